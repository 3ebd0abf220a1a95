"""What is seen of a job while it runs, by where it runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import llmbatch
from llmbatch.errors import ParameterError
from llmbatch.inference.progress import Advance, Bar, Lines, Silence, choose, unless_chosen
from tests.support.jobs import Job
from tests.support.paths import ROOT


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def in_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be where IPython has a kernel."""
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_a_terminal_and_a_notebook_have_a_bar_and_others_have_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose(quiet=False, stream=Terminal()), Bar)
    assert isinstance(choose(quiet=False, stream=io.StringIO()), Lines)
    in_notebook(monkeypatch)
    assert isinstance(choose(quiet=False, stream=io.StringIO()), Bar)
    assert isinstance(choose(quiet=True, stream=io.StringIO()), Silence)


def test_who_chose_nothing_sees_a_bar_in_a_notebook_and_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Lines(io.StringIO())
    assert isinstance(unless_chosen(None), Silence)
    assert unless_chosen(chosen) is chosen
    in_notebook(monkeypatch)
    assert isinstance(unless_chosen(None), Bar)
    assert unless_chosen(chosen) is chosen


@pytest.mark.parametrize("call", [llmbatch.run, lambda *_, **given: llmbatch.serve(**given)])
def test_progress_and_a_request_to_stop_are_checked(call: Callable[..., Any], job: Job) -> None:
    with pytest.raises(ParameterError) as raised:
        call(job.source, job.out, model=job.model, progress=5)
    assert str(raised.value) == "progress must have the methods start, advance and say (llmbatch.Progress), got 5"
    with pytest.raises(ParameterError) as raised:
        call(job.source, job.out, model=job.model, stopping=0)
    assert str(raised.value) == "stopping must be a StopRequest, got 0"


def test_a_bar_shows_rows_and_tokens_and_sentences_above_them() -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar.say("going on")
    bar.start(2)
    bar.advance(Advance(1, 100))
    bar.advance(Advance(2, 200))
    shown = stream.getvalue()
    assert "llmbatch: going on\n" in shown
    assert "2/2" in shown
    assert "tokens/s" in shown


CELLS = (
    "import warnings\nwarnings.simplefilter('always')\nimport llmbatch\noptions = {options!r}",
    "llmbatch.explain({source!r}, **options)",
    "llmbatch.run({source!r}, {out!r}, **options)",
)


def test_a_notebook_shows_tables_and_a_bar_and_does_not_ask_for_widgets(job: Job) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat: Any = pytest.importorskip("nbformat")
    options = {name: value for name, value in job.options.items() if name != "window_rows"}
    given = {"source": str(job.source), "out": str(job.out), "options": {"model": job.model, **options}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.format(**given)) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    tables = [one.data["text/html"] for cell in notebook.cells for one in cell.outputs if "data" in one]
    assert ["60 (0 errors" in table for table in tables] == [True, True]
    written = "".join(one.text for one in notebook.cells[-1].outputs if one.output_type == "stream")
    assert "60/60" in written
    assert "IProgress" not in written

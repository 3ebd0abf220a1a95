"""The start of a job: what is compiled and how often, what is kept, what is imported."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import llmbatch
import llmbatch.compilation.decorators
import llmbatch.inference.answers.assembler
from llmbatch.compilation.decorators import as_python, code_folder, compiled
from llmbatch.compilation.interpreted import stop_interpreting
from llmbatch.compilation.references import by_reference
from llmbatch.engine.cpu import compilation, compile_ahead
from llmbatch.engine.cpu.attention import CpuOps
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.inference.answers.assembler import AnswerAssembler, FlushPolicy
from llmbatch.inference.progress import Silence
from llmbatch.io.row_hash import hash_rows
from llmbatch.kernels.cpu import attention, blocks, decoder, fused, products
from llmbatch.preprocess.tokenization import loading
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
from llmbatch.runtime.protocols import CompletedRequests
from llmbatch.runtime.warmup import Compilation
from llmbatch.system.measurements import remembered
from llmbatch.system.processes import start_beside
from tests.support.compiled import specialisations
from tests.support.models import chat_model_folder, tiny_model_folder


@by_reference
class Inner(NamedTuple):
    """A part of `Outer`."""

    flag: bool
    column: NDArray[np.int32]


@by_reference
class Outer(NamedTuple):
    """Every kind of field."""

    number: int
    grid: NDArray[np.float64]  # [rows, columns]
    inner: Inner
    rate: float
    marks: NDArray[np.uint8]


@compiled(cache=False)
def _total(outer: Any) -> Any:
    total = outer.number + outer.rate + outer.grid.sum()
    for i in range(outer.grid.shape[0]):
        total += outer.grid[i, 0]
    if outer.inner.flag:
        total += outer.inner.column[-1] + len(outer.marks)
    return total


@compiled(cache=False)
def _first_to(outer: Any, value: int) -> None:
    outer.inner.column[0] = value


@compiled(cache=False)
def _same(value: Any) -> Any:
    return value


@compiled(cache=False)
def _of_many_types(column: Any) -> Any:
    return _same(column[0]) + _same(1) + _same(len(column))


def _outer(count: int = 3, rate: float = 0.5, flag: bool = True, rows: int = 2) -> Outer:
    grid = np.arange(rows * 3, dtype=np.float64).reshape(rows, 3)
    return Outer(count, grid, Inner(flag, np.arange(4, dtype=np.int32)), rate, np.zeros(5, np.uint8))


@given(st.integers(-(2**62), 2**62), st.floats(-1e6, 1e6), st.booleans(), st.integers(1, 4))
def test_compiled_code_reads_every_kind_of_field(count: int, rate: float, flag: bool, rows: int) -> None:
    outer = _outer(count, rate, flag, rows)
    assert _total(outer) == pytest.approx(as_python(_total)(outer), rel=1e-12)


def test_compiled_code_writes_the_instance_s_own_arrays() -> None:
    outer = _outer()
    _first_to(outer, 7)
    assert outer.inner.column.tolist() == [7, 1, 2, 3]


def test_a_replaced_field_is_seen() -> None:
    outer = _outer()
    before = _total(outer)
    assert _total(outer._replace(number=outer.number + 1)) == before + 1


def test_a_copy_has_an_address_of_its_own() -> None:
    outer = _outer()
    _total(outer)
    copy = pickle.loads(pickle.dumps(outer))
    _first_to(copy, 9)
    assert (outer.inner.column[0], copy.inner.column[0]) == (0, 9)
    assert type(copy) is Outer


def test_a_callee_is_compiled_once_for_all_integers() -> None:
    _of_many_types(np.array([5], np.int32))
    assert specialisations(_same) == 1


def test_compiled_code_is_named_by_the_content_of_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.compilation.decorators, "_PACKAGE", tmp_path)
    names = []
    for text in ("@compiled\n", "@compiled  # changed\n", "@compiled  # changed\n"):
        (tmp_path / "callee.py").write_text(text)
        names.append(code_folder.__wrapped__())
    assert names[0] != names[1]
    assert names[1] == names[2]
    (tmp_path / "other.py").write_text("nothing is compiled here\n")
    assert code_folder.__wrapped__() == names[1]


class _Told(Silence):
    """Notes what is said."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


@pytest.fixture
def told() -> Iterator[_Told]:
    """What a compilation says; whatever it began is ended."""
    yield _Told()
    stop_interpreting()


def test_where_the_scheduler_is_compiled_no_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: _Told
) -> None:
    monkeypatch.setattr("llmbatch.runtime.warmup.code_folder", lambda: tmp_path)
    monkeypatch.setattr("llmbatch.runtime.warmup.start_beside", _refuse)
    (tmp_path / "scheduler").touch()
    compilation = Compilation.start(told.say)
    assert not compilation.pending
    compilation.finish()
    assert told.sentences == []


def test_another_process_compiles_and_leaves_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: _Told
) -> None:
    monkeypatch.setattr("llmbatch.runtime.warmup.code_folder", lambda: tmp_path)
    monkeypatch.setattr("llmbatch.system.processes._PROGRAM", f"open({str(tmp_path / 'scheduler')!r}, 'w')")
    monkeypatch.setattr("llmbatch.runtime.warmup.rehearse", _refuse)
    compilation = Compilation.start(told.say)
    compilation.finish()
    assert not compilation.pending
    assert told.sentences[0] == (
        "planning and scheduling are not compiled yet: few rows are run in slower Python until another process has "
        "compiled them, once for this machine; many rows wait for it"
    )


_MAKES_WAY = """
import os, pathlib, time
folder = pathlib.Path({folder!r})
os.nice(10)
(folder / "pid").write_text(str(os.getpid()))
os.replace(folder / "pid", folder / "scheduler.lock")
for _ in range(3000):
    if os.getpriority(os.PRIO_PROCESS, 0) == 0:
        (folder / "scheduler").touch()
        break
    time.sleep(0.01)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser may take back that a process makes way")
def test_a_process_that_is_waited_for_no_longer_makes_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: _Told
) -> None:
    monkeypatch.setattr("llmbatch.runtime.warmup.code_folder", lambda: tmp_path)
    monkeypatch.setattr("llmbatch.system.processes._PROGRAM", _MAKES_WAY.format(folder=str(tmp_path)))
    monkeypatch.setattr("llmbatch.runtime.warmup.rehearse", _refuse)
    compilation = Compilation.start(told.say)
    while not (tmp_path / "scheduler.lock").exists():
        os.sched_yield()
    compilation.finish()
    assert (tmp_path / "scheduler").exists()


def test_few_rows_do_not_wait_for_the_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: _Told
) -> None:
    monkeypatch.setattr("llmbatch.runtime.warmup.code_folder", lambda: tmp_path)
    monkeypatch.setattr("llmbatch.system.processes._PROGRAM", "import time; time.sleep(60)")
    other = start_beside("llmbatch.runtime.warmup")
    monkeypatch.setattr("llmbatch.runtime.warmup.start_beside", lambda _: other)
    monkeypatch.setattr("llmbatch.runtime.warmup.rehearse", _refuse)
    compilation = Compilation.start(told.say)
    try:
        compilation.load()
        hashes = hash_rows(pa.table({"text": ["a"]}))
        assert compilation.pending
        stop_interpreting()
        assert hashes.tolist() == hash_rows(pa.table({"text": ["a"]})).tolist()
    finally:
        other.kill()


def test_where_the_other_process_fails_this_one_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: _Told
) -> None:
    monkeypatch.setattr("llmbatch.runtime.warmup.code_folder", lambda: tmp_path)
    monkeypatch.setattr("llmbatch.system.processes._PROGRAM", "raise SystemExit(1)")
    rehearsed: list[bool] = []
    monkeypatch.setattr("llmbatch.runtime.warmup.rehearse", lambda: rehearsed.append(True))
    Compilation.start(told.say).finish()
    assert rehearsed == [True]


def test_where_nothing_can_be_kept_this_process_compiles_before_it_runs_rows(
    monkeypatch: pytest.MonkeyPatch, told: _Told
) -> None:
    monkeypatch.setattr("llmbatch.runtime.warmup.kept", lambda: False)
    monkeypatch.setattr("llmbatch.runtime.warmup.start_beside", _refuse)
    rehearsed: list[bool] = []
    monkeypatch.setattr("llmbatch.runtime.warmup.rehearse", lambda: rehearsed.append(True))
    Compilation.start(told.say).load()
    assert rehearsed == [True]
    assert told.sentences == ["compiling for this machine: this job starts some 30 seconds later"]


def test_what_was_measured_is_kept_and_what_is_broken_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr("llmbatch.system.measurements._seconds_of_others", lambda: 0.0)
    figures = iter((1.5, 2.5, 3.5))
    assert [remembered("flops", lambda: next(figures), "1.0") for _ in range(2)] == [1.5, 1.5]
    assert remembered("flops", lambda: next(figures), "1.1") == 2.5
    for file in (tmp_path / "processors").iterdir():
        file.write_text("{")
    assert remembered("flops", lambda: next(figures), "1.0") == 3.5


class _Sink:
    """Notes when it is handed answers."""

    def __init__(self) -> None:
        self.ticks = 0

    def after_step(self) -> None:
        self.ticks += 1


def test_a_stream_that_has_just_begun_holds_answers_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("llmbatch.inference.answers.assembler.time.monotonic", lambda: clock[0])
    sink: Any = _Sink()
    columns: Any = None
    answering = AnswerAssembler(sink, lambda *_: [], columns, 1.0, FlushPolicy(rows=1000, seconds=5.0))
    handed: list[float] = []
    monkeypatch.setattr(answering, "flush", lambda: handed.append(clock[0]))
    for held_at, waits, hands_on in ((100.0, 0.24, 0.26), (110.0, 2.0, 3.0), (200.0, 4.9, 5.1)):
        answering._since, answering._count = held_at, 1
        for waited in (waits, hands_on):
            clock[0] = held_at + waited
            answering.after_step(_nothing())
    assert handed == [100.26, 113.0, 205.1]


def _nothing() -> Any:
    return object.__new__(CompletedRequests)


def test_help_imports_nothing_that_computes() -> None:
    program = (
        "import sys; from llmbatch.cli.parser import make_parser; make_parser().format_help(); "
        "print([name for name in ('numba', 'numpy', 'pyarrow', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("nothing is to be compiled")


def _run_step(loaded: LoadedModel) -> None:
    ids = torch.arange(3)[None]
    step = CpuOps().probe_step(loaded.attention, loaded.dtype, 3)
    loaded.module(input_ids=ids, position_ids=ids, use_cache=False, llmbatch=step)


def test_kernels_are_compiled_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []
    waits = threading.Event()

    class _Process:
        def wait(self) -> None:
            waits.set()

    def start(*given: str) -> _Process:
        started.append(given)
        return _Process()

    monkeypatch.setattr(compilation, "start_beside", start)
    mark = compile_ahead.mark_of("float32", "auto")
    assert mark is not None
    mark.unlink(missing_ok=True)
    compilation.compile_ahead("float32", "auto")
    assert started == [("llmbatch.engine.cpu.compile_ahead", "float32", "auto")]
    assert waits.wait(60)  # none is left a zombie
    compile_ahead.main("float32", "auto")
    compilation.compile_ahead("float32", "auto")
    assert len(started) == 1
    assert compile_ahead.mark_of("float16", "auto") is None


def test_what_was_compiled_ahead_is_what_a_job_calls() -> None:
    program = (
        "import numpy as np; from llmbatch.engine.cpu import compile_ahead; "
        "from llmbatch.kernels.cpu import attention, products; "
        "{}; kept = attention._attend_share.stats, products._add.stats; "
        "print([sum(s.cache_hits.values()) for s in kept], [sum(s.cache_misses.values()) for s in kept])"
    )
    calls = (
        "compile_ahead.main('float32', 'auto')",
        "f4 = np.dtype('f4'); attention.block_code(f4, f4, f4, f4); products.tile_codes(f4)",
    )
    for call in calls:
        command = [sys.executable, "-c", program.format(call)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "[1, 1] [0, 0]"


def test_another_family_compiles_nothing(tmp_path: Path) -> None:
    kernels: list[Any] = [attention._attend_share, blocks.cut_blocks]
    kernels += [fused.normalize, fused.gate, decoder.run_layers, decoder._run_share]
    kernels += [*products._OF_LAYERS.values(), products.pack]
    _run_step(load_model(tiny_model_folder(tmp_path / "llama", "llama"), dtype="float32", platform=HOST))
    before = [len(kernel.signatures) for kernel in kernels]
    assert min(before) >= 1
    for family in ("gemma3", "qwen3"):
        _run_step(load_model(tiny_model_folder(tmp_path / family, family), dtype="float32", platform=HOST))
    assert [len(kernel.signatures) for kernel in kernels] == before


@pytest.mark.parametrize(
    ("asked", "row"),
    [
        ({"prompt": "text", "chat": True}, {"text": "a"}),
        ({"messages": "said"}, {"said": [{"role": "user", "content": "a"}]}),
        (
            {},
            {
                "custom_id": "1",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": "a"}]},
            },
        ),
    ],
    ids=["chat", "messages", "batch"],
)
def test_what_chats_need_is_loaded_in_the_thread_that_an_interrupt_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], row: dict[str, Any]
) -> None:
    loaded, threads = loading.load_tokenizer, []

    def load(*given: Any, **rest: Any) -> Tokenizer:
        threads.append(threading.current_thread())
        return loaded(*given, **rest)

    monkeypatch.setattr(loading, "load_tokenizer", load)
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    model = chat_model_folder(tmp_path / "model")
    llmbatch.run(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), model=model, engine="simulated", **asked)
    assert threads == [threading.main_thread()]

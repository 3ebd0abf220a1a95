"""What documents say is so: lists are those of the code, examples run, links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import runpy
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import llmbatch
from llmbatch.cli.main import main
from tests.support.models import CHAT_TEMPLATE, tiny_model_folder
from tests.support.paths import ROOT
from tests.support.s3 import S3Server
from tests.support.s3 import s3_fixture as s3_fixture

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
HUB = "Qwen/Qwen3-0.6B"  # the model of the README's examples
WITH_A_MODEL = ("llmbatch.jobs.explain", "llmbatch.jobs.job", "llmbatch.serving.serve")  # in their examples
MOST_BYTES = 150_000  # of a picture


def blocks(language: str) -> list[str]:
    """The README's examples in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def with_examples() -> list[str]:
    """Modules whose docstrings have examples that need no model."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "llmbatch").rglob("*.py"))}
    found = (path.relative_to(ROOT).with_suffix("") for path, text in texts.items() if ">>> " in text)
    return [name for name in (".".join(path.parts) for path in found) if name not in WITH_A_MODEL]


def headings(page: Path) -> set[str]:
    """What links to a page may name, as GitHub spells it."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links() -> Iterator[tuple[Path, str]]:
    """The links of each page that lead into the repository."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")):
                yield page, target


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a tiny model with a chat template."""
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "qwen3", chat_template=CHAT_TEMPLATE)


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the dataset of the README's examples."""
    pq.write_table(
        pa.table({"question": ["Why is the sky blue?", "Why is grass green?"]}), tmp_path / "questions.parquet"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_example(example: str, model: str) -> dict[str, Any]:
    """Run an example of the README by the simulated engine, with a small model's tokenizer."""
    assert HUB in example
    scope: dict[str, Any] = {}
    exec(example.replace(f'"{HUB}"', f'"{model}", engine="simulated"'), scope)
    return scope


@pytest.mark.parametrize("name", ["architecture.md", "options.md", "models.md"])
def test_lists_are_those_of_the_code(name: str) -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert tables["fill"](name, page) == page, "run `make docs`"


def test_the_readme_runs_a_dataset(chat_model: str, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_example(blocks("python")[0], chat_model)
    assert float(capsys.readouterr().out) > 0
    assert pq.read_table(questions / "answers").num_rows == 2


def test_the_readme_answers_a_table(chat_model: str, questions: Path) -> None:
    polars = pytest.importorskip("polars")
    table = run_example(blocks("python")[1], chat_model)["table"]
    assert isinstance(table, polars.DataFrame)
    assert table.columns[:2] == ["question", "generated_text"]


@pytest.fixture
def stored(questions: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, and its dataset on S3, where the README's examples read it."""
    for name, value in {**s3.environment, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    bucket = s3.bucket("bucket")
    fsspec.filesystem("s3", **s3.storage_options).put(str(questions / "questions.parquet"), f"{bucket}/")
    return questions


def test_the_readme_answers_a_lazy_query_of_a_store(chat_model: str, stored: Path) -> None:
    pytest.importorskip("polars")
    run_example(blocks("python")[2], chat_model)
    assert pq.read_table(stored / "answers.parquet").column_names[:2] == ["question", "generated_text"]


def test_the_readme_answers_a_stream_of_a_store(chat_model: str, stored: Path) -> None:
    answer: Any = llmbatch.LLMOperator(model=chat_model, prompt="question", engine="simulated")
    import_module("pyarrow.dataset")
    [line] = re.findall(r"`(answer\.stream\(.*?\))`", README)
    assert eval(line, {"answer": answer, "pyarrow": pa}).read_all().column_names[:2] == ["question", "generated_text"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_the_readme_answers_a_ray_dataset(chat_model: str, questions: Path) -> None:
    ray = pytest.importorskip("ray")
    from tests.support.ray_jobs import start

    start(num_cpus=2, include_dashboard=False)
    try:
        run_example(blocks("python")[3].replace("concurrency=8, num_gpus=1", "concurrency=1, num_cpus=0.1"), chat_model)
    finally:
        ray.shutdown()
    assert pq.read_table(questions / "answers").num_rows == 2


@pytest.mark.parametrize("command", blocks("sh")[0].splitlines())
def test_the_readmes_commands_run(command: str, chat_model: str, questions: Path) -> None:
    program, *arguments = shlex.split(command.replace(HUB, chat_model))
    assert program == "llmbatch"
    assert main([*arguments, "--engine", "simulated"]) == 0


def test_the_example_answers_a_batch(chat_model: str, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "openai_batch.py"))["main"](chat_model, questions / "requests.jsonl")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2].startswith("story failed: temprature must be left out")
    assert printed[-1].startswith("4 lines, 1 failed, ")


@pytest.mark.parametrize("name", with_examples())
def test_examples_of_docstrings_hold(name: str) -> None:
    module = import_module(name)
    assert module.__file__ is not None
    texts = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8")))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]
    examples = doctest.DocTestParser().get_doctest("\n\n".join(texts), vars(module).copy(), name, module.__file__, 0)
    assert examples.examples
    assert doctest.DocTestRunner().run(examples).failed == 0


@pytest.mark.parametrize("name", ["LLMOperator", "explain", "run"])
def test_examples_of_public_functions_hold(name: str, chat_model: str, questions: Path) -> None:
    text = inspect.getdoc(getattr(llmbatch, name)) or ""
    assert HUB in text
    text = text.replace(f'"{HUB}"', f'"{chat_model}", engine="simulated"')
    examples = doctest.DocTestParser().get_doctest(text, {"llmbatch": llmbatch}, name, None, 0)
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page, target in links():
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in headings(file)):
            broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_what_the_code_cites_of_the_design_is_there() -> None:
    cited = {
        title
        for file in (ROOT / "llmbatch").rglob("*.py")
        for title in re.findall(r'\(design: "([^"]+)"\)', file.read_text(encoding="utf-8"))
    }
    there = headings(ROOT / "docs" / "design.md")
    assert {title for title in cited if title.lower().replace(" ", "-") not in there} == set()


def test_pictures_are_small() -> None:
    large = [file.name for file in (ROOT / "docs" / "pictures").iterdir() if file.stat().st_size > MOST_BYTES]
    assert large == []


def test_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    declared = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())
    assert set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)) == declared

"""The command line: what it prints, what it refuses and how."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.cli.main import main
from llmbatch.cli.parser import make_parser
from llmbatch.errors import ParameterError

COUNTS = "counts by name, each name once, such as h100:8,l40s:8"
SIZES = "sizes by name, each name once, such as memory=1TB,bandwidth=200GB"
PRICES = "prices by name, each name once, such as h100=2.5,l40s=1"


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["abc", "abd", None], "number": [1, 2, 3]}), path)
    return str(path)


def run(*arguments: str) -> int:
    return main(["run", *arguments])


def test_json_is_all_that_standard_output_holds(
    model: str, source: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = run(
        source, "--output", str(tmp_path / "out"), "--model", model, "--prompt", "text",
        "--max-tokens", "3", "--kv-memory", "16MiB", "--json",
    )  # fmt: skip  # arguments in groups
    printed = capfd.readouterr()
    report = json.loads(printed.out)
    assert status == 0
    assert {key: report[key] for key in ("rows", "errors", "duplicates")} == {"rows": 3, "errors": 1, "duplicates": 0}
    for key in (
        "input_tokens", "cached_tokens", "output_tokens", "load_seconds", "seconds", "tokens_per_second",
        "prefix_sharing", "prefix_sharing_optimal", "preemptions", "steps",
    ):  # fmt: skip  # arguments in groups
        assert isinstance(report[key], (int, float)), key
    assert "3 of 3 rows" in printed.err


def test_quiet_prints_nothing(model: str, source: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = run(
        source, "--output", str(tmp_path / "out"), "--model", model, "--prompt", "text",
        "--max-tokens", "3", "--kv-memory", "16MiB", "--quiet",
    )  # fmt: skip  # arguments in groups
    assert status == 0
    assert capfd.readouterr() == ("", "")


def test_the_same_command_on_its_finished_output_says_so(
    model: str, source: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [source, "--output", str(tmp_path / "out"), "--model", model, "--prompt", "text", "--max-tokens", "3"]
    assert run(*command, "--kv-memory", "16MiB") == 0
    capfd.readouterr()
    assert run(*command, "--kv-memory", "16MiB") == 0
    said = capfd.readouterr().err
    assert said == f"llmbatch: the output {tmp_path / 'out'} is finished already; --restart starts over\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "text", "--max-tokens", "-3"], "max_tokens must be at least 1, got -3"),
        (["--prompt", "txt"], "'txt'"),
        (["--prompt", "number"], "'number'"),
        (["--template", "Q: {question}"], "'question'"),
        (["--prompt", "text", "--frobnicate"], "unrecognized arguments: --frobnicate (see llmbatch run --help)"),
        (["--prompt", "text", "--max", "3"], "unrecognized arguments: --max 3 (see llmbatch run --help)"),
        (
            ["--prompt", "text", "--max_tokens=3"],
            "unrecognized arguments: --max_tokens=3: did you mean --max-tokens? (see llmbatch run --help)",
        ),
        (
            ["--prompt", "text", "--tempratur", "1"],
            "unrecognized arguments: --tempratur 1: did you mean --temperature?",
        ),
        (
            ["--prompt", "text", "--max-model-len", "9"],
            "unrecognized arguments: --max-model-len 9: did you mean --context-length?",
        ),
        (["--prompt", "text", "--max-tokens", "abc"], "argument --max-tokens: must be a whole number, got 'abc'"),
        (["--prompt", "text", "--temperature", "hot"], "argument --temperature: must be a number, got 'hot'"),
        (["--prompt", "text", "--kv-memory", "lots"], "must be a number of bytes such as 2e9 or 4GiB, got 'lots'"),
        (["--prompt", "text", "--kv-memory", "10"], "kv_memory must hold at least one page of"),
        (["--prompt", "text", "--order", "best"], "argument --order: must be one of "),
        (
            [],
            "exactly one of prompt, template, messages and turns must be given, got none: only a batch in",
        ),
        (["--prompt", "text", "--temperature", "-1"], "temperature must be"),
        (["--prompt", "text", "--sampling-params", "text2"], "'text2'"),
        (["--messages", "text", "--chat"], "chat"),
    ],
)
def test_a_wrong_command_gets_one_sentence_and_status_2(
    model: str, source: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    out = tmp_path / "out"
    assert run(source, "--output", str(out), "--model", model, *arguments) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("llmbatch: ")
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not out.exists()


def test_a_command_that_is_none_is_refused_with_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rnu", "in"]) == 2
    assert capfd.readouterr().err == (
        "llmbatch: argument COMMAND: must be one of run, explain, simulate, serve, got 'rnu': did you mean run? "
        "(see llmbatch --help)\n"
    )


def assert_refused(source: str, model: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The command ends with status 2 and a sentence that names what is wrong; nothing is created."""
    out = Path(source).parent / "out"
    assert run(source, "--output", str(out), "--model", model, "--prompt", "text") == 2
    assert said in capfd.readouterr().err
    assert not out.exists()


def test_a_missing_file_is_named(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "nowhere.parquet"
    assert_refused(str(missing), model, str(missing), capfd)


def test_a_truncated_parquet_is_named(
    model: str, source: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(Path(source).read_bytes()[:-20])
    assert_refused(str(cut), model, str(cut), capfd)


def test_a_model_that_is_nowhere_is_named(source: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(source, str(tmp_path / "no-model"), "no-model", capfd)


def test_a_model_without_a_tokenizer_is_named(
    model: str, source: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in Path(model).iterdir():
        if "token" not in file.name:
            (bare / file.name).write_bytes(file.read_bytes())
    assert_refused(source, str(bare), "has no tokenizer", capfd)


def test_an_occupied_output_is_refused(
    model: str, source: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert run(source, "--output", str(out), "--model", model, "--prompt", "text") == 2
    assert str(out) in capfd.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("number", "status", "last"),
    [
        (signal.SIGINT, 130, "interrupted; what a job has answered is kept, and the same command goes on with it\n"),
        (signal.SIGTERM, 143, "/_llmbatch, and the same command goes on\n"),
    ],
)
def test_an_interrupted_job_keeps_what_it_has(
    model: str, tmp_path: Path, number: signal.Signals, status: int, last: str
) -> None:
    source = tmp_path / "many.parquet"
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(20_000)]}), source)
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "llmbatch", "run", str(source), "--output", str(out), "--model", model,
        "--prompt", "text", "--max-tokens", "400", "--ignore-eos", "--kv-memory", "64MiB", "--grace", "0",
    ]  # fmt: skip  # a table
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert process.stderr is not None
        before = list(takewhile(lambda line: "20,000 rows to answer" not in line, process.stderr))
        assert (out / "_llmbatch").exists(), before
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status
    assert said.endswith(last)
    assert "Traceback" not in said
    assert sorted(path.name for path in out.iterdir()) == ["_llmbatch"]
    assert (out / "_llmbatch" / "job.json").exists()


@pytest.mark.parametrize(
    ("text", "seconds"), [("0.3", 0.3), ("300ms", 0.3), ("1s", 1.0), ("2min", 120.0), (" 5 S", 5.0)]
)
def test_a_time_has_a_unit_or_is_seconds(text: str, seconds: float) -> None:
    given = vars(make_parser().parse_args(["serve", "--model", "m", "--ttft", text]))
    assert given["ttft"] == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "1h", "s"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match=r"argument --ttft: must be a time such as 0\.3, 300ms or 1s, got "):
        make_parser().parse_args(["serve", "--model", "m", "--ttft", text])


def test_tokens_and_texts_that_end_an_answer_may_be_repeated() -> None:
    words = ["explain", "in", "--model", "m", "--stop", "a", "--stop", "b", "--stop-token-ids", "7"]
    given = vars(make_parser().parse_args([*words, "--stop-token-ids", "8"]))
    assert (given["stop"], given["stop_token_ids"]) == (["a", "b"], [7, 8])
    with pytest.raises(ParameterError, match=r"argument --stop-token-ids: must be a whole number, got 'x'"):
        make_parser().parse_args([*words, "--stop-token-ids", "x"])


@pytest.mark.parametrize("tools", ['[{"type": "function"}]', "tools"])
def test_tools_are_json_for_all_rows_or_the_name_of_a_column(tools: str) -> None:
    given = vars(make_parser().parse_args(["explain", "in", "--model", "m", "--tools", tools]))
    assert given["tools"] == tools


def test_devices_prices_and_sizes_are_by_name() -> None:
    words = ["explain", "in", "--model", "m", "--search", "--devices", "h100:8, l40s:4", "--price", "h100=2.5"]
    given = vars(make_parser().parse_args([*words, "--device-host", "memory=1TiB, bandwidth=200GB,compute=1e12"]))
    assert (given["search"], given["devices"], given["price"]) == (True, {"h100": 8, "l40s": 4}, {"h100": 2.5})
    assert given["device_host"] == {"memory": 2**40, "bandwidth": 2e11, "compute": 1e12}


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        *(
            ("--devices", given, f"argument --devices: must be {COUNTS}, got {given!r}")
            for given in ("h100=8", "h100:many", "h100:4,h100:4")
        ),
        *(
            ("--price", given, f"argument --price: must be {PRICES}, got {given!r}")
            for given in ("2.5", "h100=2.5, h100=3")
        ),
        *(
            ("--device-host", given, f"argument --device-host: must be {SIZES}, got {given!r}")
            for given in ("1TB", "memory=much", "memory=1TB,memory=2TB")
        ),
    ],
)
def test_devices_prices_and_sizes_of_another_form_are_refused(flag: str, text: str, said: str) -> None:
    with pytest.raises(ParameterError) as raised:
        make_parser().parse_args(["explain", "in", "--model", "m", flag, text])
    assert str(raised.value).startswith(said)

"""Jobs at endpoints of llmbatch: windows travel whole, and their answers are those of a job here."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

import llmbatch
from llmbatch.errors import DataError, InputError, JobError, ParameterError
from llmbatch.inference.options import Options
from llmbatch.inference.report import Report
from llmbatch.inference.window import Window
from llmbatch.openai.validation import NO_TEMPLATE
from llmbatch.remote.retries import Patience
from llmbatch.remote.windows.expansion import expanded_bytes
from llmbatch.remote.windows.messages import PATH, VERSION, FrameReader, columns_sent, frame, read_window, write_window
from llmbatch.remote.windows.service import WindowCall, WindowService
from llmbatch.runtime.protocols import Stop
from tests.support import killing
from tests.support.batches import CHAT, line, write
from tests.support.endpoints import endpoint, served
from tests.support.models import CHAT_TEMPLATE, tiny_model_folder
from tests.support.paths import ROOT
from tests.support.window_server import WindowServer, window_server, worker_of

TEXTS = [f"{'abcd'[i % 4] * (1 + i % 5)} {i * 7 % 40}" for i in range(40)]
SAME = ("generated_text", "num_input_tokens", "num_generated_tokens", "finish_reason", "error", "error_kind")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long to go back."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("llmbatch.remote.worker.PATIENCE", Patience(first=0.0, tries=3))


@pytest.fixture(scope="module")
def loaded(model: str) -> Any:
    """The worker of an endpoint."""
    return worker_of(model)


@pytest.fixture
def there(loaded: Any) -> Iterator[WindowServer]:
    """An endpoint of llmbatch."""
    with window_server(loaded) as server:
        yield server


@pytest.fixture
def chatting(tmp_path: Path) -> Iterator[WindowServer]:
    """An endpoint of llmbatch whose model has a chat template."""
    with window_server(
        worker_of(tiny_model_folder(tmp_path / "model", "llama", chat_template=CHAT_TEMPLATE))
    ) as server:
        yield server


def source(folder: Path, **columns: Any) -> Path:
    """An input, written once."""
    file = folder / "in.parquet"
    if not file.exists():
        pq.write_table(pa.table({"text": TEXTS, **columns}), file)
    return file


def run(there: WindowServer, folder: Path, **options: Any) -> Report:
    """Run a job at an endpoint."""
    chosen = {"model": there.worker.options.model, "prompt": "text", "beside": there.url, "max_tokens": 8, **options}
    return llmbatch.run(source(folder), folder / "out", **chosen)


def run_here(there: WindowServer, folder: Path, **options: Any) -> Report:
    """Run the same job in this process."""
    chosen = {"model": there.worker.options.model, "prompt": "text", "max_tokens": 8, **options}
    return llmbatch.run(source(folder), folder / "here", dtype="float32", device="cpu", kv_memory=32 << 20, **chosen)


def answers(folder: Path, *more: str) -> pa.Table:
    return pq.read_table(folder).select([*SAME, *more])


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, ()),
        ({"temperature": 1.0, "n": 2}, ("choices",)),  # drawn by the keys of rows, which travel
        ({"logprobs": 1}, ("logprobs",)),
        ({"stop": ["a"], "logit_bias": {"5": 2.0}, "window_rows": 16}, ()),
    ],
)
def test_answers_are_those_of_the_same_job_here(
    there: WindowServer, tmp_path: Path, options: dict[str, Any], columns: tuple[str, ...]
) -> None:
    report, here = run(there, tmp_path, **options), run_here(there, tmp_path, **options)
    assert answers(tmp_path / "out", *columns).equals(answers(tmp_path / "here", *columns))
    same = ("rows", "errors", "duplicates", "input_tokens", "output_tokens", "prefix_sharing_optimal")
    assert [getattr(report, name) for name in same] == [getattr(here, name) for name in same]


def test_turns_are_answered_at_the_endpoint(chatting: WindowServer, tmp_path: Path) -> None:
    turns = [[f"a {i}", "b"] for i in range(len(TEXTS))]
    source(tmp_path, turns=turns)
    options = {"prompt": None, "turns": "turns"}
    run(chatting, tmp_path, **options)
    run_here(chatting, tmp_path, **options)
    assert answers(tmp_path / "out", "answers").num_rows == len(TEXTS)
    told, here = (answers(tmp_path / name, "answers")["answers"].to_pylist() for name in ("out", "here"))
    assert [[turn["text"] for turn in row] for row in told] == [[turn["text"] for turn in row] for row in here]


def test_no_chat_template_of_a_client_is_rendered_at_the_endpoint(
    chatting: WindowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"chat_template_kwargs": {"chat_template": "own"}}
    with pytest.raises(ParameterError) as caught:
        run(chatting, tmp_path, chat=True, **asked)
    assert (str(caught.value), chatting.rows) == (NO_TEMPLATE, [])
    monkeypatch.setattr("llmbatch.remote.windows.worker.check_template", lambda source: None)
    with pytest.raises(JobError, match=r"refused a window \(400\): chat_template_kwargs must not hold 'chat_template'"):
        run(chatting, tmp_path, chat=True, **asked)
    with pytest.raises(InputError, match=r"refused to forecast \(400\): chat_template_kwargs must not hold "):
        llmbatch.explain(source(tmp_path), model=chatting.worker.options.model, prompt="text", chat=True,
                         beside=chatting.url, **asked)  # fmt: skip  # as few lines as may be
    write(tmp_path / "in.jsonl", [line("a", CHAT, **asked), line("b", CHAT)])
    llmbatch.run(tmp_path / "in.jsonl", tmp_path / "lines", model=chatting.worker.options.model, beside=chatting.url)
    assert pq.read_table(tmp_path / "lines")["error"].to_pylist() == [NO_TEMPLATE, None]


def test_continuations_are_scored_at_the_endpoint(there: WindowServer, tmp_path: Path) -> None:
    source(tmp_path, more=[f" {i}" for i in range(len(TEXTS))])
    run(there, tmp_path, continuation="more", max_tokens=None)
    run_here(there, tmp_path, continuation="more", max_tokens=None)
    scores = [answers(tmp_path / name, "continuation_logprob")["continuation_logprob"] for name in ("out", "here")]
    assert np.allclose(scores[0], scores[1])


def test_rows_that_fail_have_the_errors_that_they_have_here(there: WindowServer, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "a", "b" * 5000]}), tmp_path / "in.parquet")
    report = run(there, tmp_path)
    run_here(there, tmp_path)
    assert answers(tmp_path / "out").equals(answers(tmp_path / "here"))
    assert (report.errors, report.duplicates) == (2, 1)


def test_an_operator_sends_its_tables(there: WindowServer) -> None:
    answer = llmbatch.LLMOperator(model=there.worker.options.model, prompt="text", beside=there.url, max_tokens=4)
    assert answer(pa.table({"text": ["a", "b"]}))["error"].to_pylist() == [None, None]
    assert there.rows == [2]


@pytest.mark.parametrize("breaks", [{3}, {1, 2}, {3, 7}])
def test_only_what_is_unanswered_is_sent_again_where_an_endpoint_breaks(
    there: WindowServer, tmp_path: Path, breaks: set[int]
) -> None:
    there.breaks = frozenset(breaks)
    run(there, tmp_path)
    assert len(there.rows) == 1 + len(breaks)
    assert there.rows == sorted(set(there.rows), reverse=True)
    run_here(there, tmp_path)
    assert answers(tmp_path / "out").equals(answers(tmp_path / "here"))


def test_windows_overlap_and_each_is_sent_once(there: WindowServer, tmp_path: Path) -> None:
    run(there, tmp_path, window_rows=16)
    assert there.rows == [16, 16, 8]


def test_endpoints_share_a_job(there: WindowServer, loaded: Any, tmp_path: Path) -> None:
    with window_server(loaded) as other:
        run(there, tmp_path, beside=[there.url, other.url])
        assert sum(there.rows) + sum(other.rows) == len(TEXTS)
        assert min(len(there.rows), len(other.rows)) > 0
    run_here(there, tmp_path)
    assert answers(tmp_path / "out").equals(answers(tmp_path / "here"))


def test_a_client_that_is_killed_goes_on_with_what_is_unanswered(there: WindowServer, tmp_path: Path) -> None:
    words = ["run", source(tmp_path), "--output", tmp_path / "out", "--model", there.worker.options.model]
    command = [*map(str, words), "--prompt", "text", "--max-tokens", "8", "--beside", there.url, "--quiet"]
    at = killing.Moment("llmbatch.storage.journal:_FileJournal.append", call=2, after=True)
    assert killing.run(killing.Process(command, at)).status == -9
    assert killing.run(killing.Process(command)).status == 0
    assert 0 < there.rows[-1] < there.rows[0] == len(TEXTS)
    run_here(there, tmp_path)
    assert answers(tmp_path / "out").equals(answers(tmp_path / "here"))


def test_an_endpoint_that_is_killed_and_started_again_is_found_again(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbatch.remote.worker.PATIENCE", Patience(first=0.25, most=0.25, tries=2000))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.support.window_server", model, str(port)]
    started: list[subprocess.Popen[str]] = []

    def start() -> str:
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        assert started[-1].stdout is not None
        return started[-1].stdout.readline().strip()

    class Killing(llmbatch.Progress):
        """Kills the endpoint when the first answers have come, and starts it again."""

        def start(self, rows: int) -> None: ...

        def say(self, sentence: str) -> None: ...

        def advance(self, done: llmbatch.Advance) -> None:
            if done.rows and len(started) == 1:
                started[0].send_signal(signal.SIGKILL)
                start()

    try:
        url = start()
        report = llmbatch.run(
            source(tmp_path), tmp_path / "out", progress=Killing(), model=model, prompt="text", beside=url, max_tokens=8
        )
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert len(started) == 2
    assert (report.rows, report.errors) == (len(TEXTS), 0)
    assert answers(tmp_path / "out")["num_generated_tokens"].to_pylist() == [8] * len(TEXTS)


@pytest.mark.parametrize("who", ["client", "endpoint"])
def test_a_client_that_left_or_an_endpoint_that_ends_ends_the_stream_of_a_window(who: str) -> None:
    closed = threading.Event()
    call = WindowCall(lambda one: None, closed)
    call.after_step()
    if who == "client":
        call.leave()
    else:
        closed.set()
    with pytest.raises(Stop):
        call.after_step()


def test_endpoints_of_two_kinds_are_refused(there: WindowServer, tmp_path: Path) -> None:
    name = there.worker.options.model
    with endpoint() as other:
        other.models = lambda: JSONResponse({"data": [{"id": name}]})
        with pytest.raises(ParameterError) as caught:
            run(there, tmp_path, beside=[there.url, other.url])
    assert str(caught.value) == (
        f"beside must name endpoints of one kind, but {there.url} is one of llmbatch and {other.url} is not: "
        "run a job at one kind"
    )


def test_endpoints_whose_models_differ_are_refused(
    there: WindowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about, digests = WindowService.about, iter(["one", "another"])
    monkeypatch.setattr(WindowService, "about", lambda self: {**about(self), "model_files": next(digests)})
    with window_server(there.worker) as other, pytest.raises(ParameterError) as caught:
        run(there, tmp_path, beside=[there.url, other.url])
    assert str(caught.value) == (
        f"beside must name endpoints of one model, but {there.url} and {other.url} have other files of "
        f"{there.worker.options.model!r}: run a job at those that have the same"
    )


def test_an_endpoint_says_what_it_is_while_every_thread_answers_windows(there: WindowServer) -> None:
    end = threading.Event()
    with ThreadPoolExecutor(1) as executor, served(there.app(executor)) as url:
        executor.submit(end.wait)
        try:
            assert httpx.get(url + PATH).json()["windows"] == VERSION
        finally:
            end.set()


def test_windows_that_are_too_large_together_are_refused_for_a_while(
    there: WindowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbatch.remote.windows.routes.MOST_BYTES", 1000)
    monkeypatch.setattr("llmbatch.remote.windows.routes._AT_ONCE", 1)
    statuses: list[int] = []

    def slowly() -> Iterator[bytes]:
        yield b"a" * 900
        while not statuses or statuses[-1] != 429:  # until the server has read these
            statuses.append(httpx.post(there.url + PATH, content=b"a" * 200).status_code)
        yield b"a"

    assert httpx.post(there.url + PATH, content=slowly()).status_code == 400
    assert set(statuses) <= {400, 429}
    assert httpx.post(there.url + PATH, content=b"a" * 200).status_code == 400


def test_an_endpoint_that_does_not_say_in_time_what_it_is_is_not_taken_for_another(
    there: WindowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbatch.remote.discovery._SECONDS", 1.0)
    end, about = threading.Event(), WindowService.about
    monkeypatch.setattr(WindowService, "about", lambda self: end.wait() and about(self))
    try:
        with pytest.raises(JobError, match=r"^the endpoint .* cannot be reached \(timed out\): start it first, or "):
            run(there, tmp_path)
    finally:
        end.set()


def test_rows_that_are_answered_twice_count_once(
    there: WindowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WindowCall.write

    def twice(self: WindowCall, window: Window, rows: pa.RecordBatch) -> None:
        write(self, window, rows)
        write(self, window, rows)

    monkeypatch.setattr(WindowCall, "write", twice)
    assert run(there, tmp_path).rows == len(TEXTS)
    run_here(there, tmp_path)
    assert answers(tmp_path / "out").equals(answers(tmp_path / "here"))


def test_a_window_whose_offsets_point_nowhere_is_refused() -> None:
    options = Options.build(model="m", prompt="text")
    compressed = write_window(options, pa.table({"text": ["a" * 7] * 3}), np.zeros(3, np.uint64))
    with pa.ipc.open_stream(compressed) as reader:
        table, sink = reader.read_all(), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    good, offsets = sink.getvalue().to_pybytes(), np.array([0, 7, 14, 21], np.int32).tobytes()
    assert good.count(offsets) == 1
    assert read_window(good).table.num_rows == 3
    with pytest.raises(DataError, match=r"^a window must be an Arrow stream of rows with their keys, got another"):
        read_window(good.replace(offsets, np.array([0, 1 << 30, 14, 21], np.int32).tobytes()))


def test_an_error_of_the_command_that_only_the_endpoint_sees_ends_the_job(there: WindowServer, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        run(there, tmp_path, chat=True)
    assert str(caught.value) == (
        f"the endpoint {there.url} refused a window (400): the tokenizer of {there.worker.options.model} has no chat "
        "template: give the prompts as prompt or template, without chat and system"
    )


@pytest.mark.parametrize("data", [b"", b"no arrow", b"\xff" * 100])
def test_what_is_no_window_is_refused_in_a_sentence(there: WindowServer, data: bytes) -> None:
    reply = httpx.post(there.url + PATH, content=data)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message.startswith("a window must be an Arrow stream of rows with their keys, got another (")


def compressed(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


@pytest.mark.parametrize("asks", [1 << 20, 1 << 50])  # bytes that a buffer takes, and that it says it takes
def test_a_window_that_takes_too_much_when_it_is_decompressed_is_refused_before_it_is(
    there: WindowServer, monkeypatch: pytest.MonkeyPatch, asks: int
) -> None:
    monkeypatch.setattr("llmbatch.remote.windows.messages.MOST_EXPANDED", 1 << 19)
    data = compressed(pa.table({"text": ["a" * (1 << 20)], "key": np.zeros(1, np.uint64)}))
    head, _, content = data.rpartition((1 << 20).to_bytes(8, "little"))
    data = head + asks.to_bytes(8, "little") + content
    message = httpx.post(there.url + PATH, content=data).json()["error"]["message"]
    assert len(data) < 1500
    assert message == (
        f"a window must take at most 524,288 bytes when it is decompressed, got {asks + 16:,}: "
        "send fewer rows at once (--window-rows)"
    )


def test_texts_of_a_dictionary_count_as_often_as_rows_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmbatch.remote.windows.messages.MOST_EXPANDED", 99_999)
    texts = pa.array(["a" * 1000, "b"] * 100).dictionary_encode()
    with pytest.raises(DataError, match="got 100,100: send fewer rows"):
        read_window(compressed(pa.table({"text": texts, "key": np.zeros(200, np.uint64)})))


@given(
    st.lists(st.text(max_size=30), max_size=50),
    st.sampled_from([None, "zstd", "lz4"]),
    st.integers(1, 60),
    st.sampled_from([pa.string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]),
)
def test_what_a_stream_takes_is_told_as_it_will_be(
    texts: list[str], compression: str | None, chunk: int, kind: pa.DataType
) -> None:
    table = pa.table({
        "text": pa.array(texts, pa.string()).cast(kind),
        "messages": pa.array([[{"role": text}] for text in texts], pa.list_(pa.struct({"role": pa.string()}))),
    })  # fmt: skip  # a table
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=chunk)
    data = sink.getvalue().to_pybytes()
    taken = pa.ipc.open_stream(data).read_all().get_total_buffer_size()
    assert taken <= expanded_bytes(data) <= taken + (0 if compression else len(data))


def test_a_window_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options.build(model="m", prompt="text")
    monkeypatch.setattr("llmbatch.remote.windows.messages.VERSION", 9)
    data = write_window(options, pa.table({"text": ["a"]}), np.zeros(1, np.uint64))
    monkeypatch.undo()
    with pytest.raises(DataError) as caught:
        read_window(data)
    assert str(caught.value) == "the version of a window must be 1, got 9: client and endpoint differ"


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "text"},
        {"template": "{text} {other}", "system": "s", "n": 3, "temperature": 0.5, "seed": 1},
        {"messages": "text", "tools": [{"a": 1}], "chat_template_kwargs": {"b": [1]}, "row_timeout": 2.0},
        {"prompt": "text", "sampling_params": "other", "structured_outputs": {"choice": ["x", "y"]}},
        {"prompt": "text", "stop": ["a"], "stop_token_ids": [3, 1], "logit_bias": {"5": 1.5}, "logprobs": 2},
        {},
    ],
)
def test_a_window_says_what_is_asked(given: dict[str, Any]) -> None:
    options = Options.build(model="m", **given) if given else Options.of_batch(model="m")
    names = columns_sent(options)
    table = pa.table({"more": [1, 2], **{name: ["a", "b"] for name in names}}).replace_schema_metadata({"x": "y"})
    sent = read_window(write_window(options, table, np.array([3, 2**64 - 1], np.uint64)))
    assert sent.table.equals(table.select(names).replace_schema_metadata(None))
    assert sent.keys.tolist() == [3, 2**64 - 1]
    assert {name: getattr(options, name) for name in sent.asked} == sent.asked


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=50))), st.data())
def test_frames_are_found_however_the_bytes_are_cut(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    whole = b"".join(frame(kind, content) for kind, content in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    reader = FrameReader()
    found: list[tuple[int, bytes]] = []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += reader.read(whole[begin:end])
    assert found == frames


def test_a_forecast_is_that_of_the_endpoint(there: WindowServer, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": there.worker.options.model, "prompt": "text", "max_tokens": 8}
    found = llmbatch.explain(source(tmp_path), beside=there.url, **asked)
    here = llmbatch.explain(source(tmp_path), dtype="float32", device="cpu", kv_memory=32 << 20, max_running=4, **asked)
    names = ("rows", "input_tokens", "output_tokens_most", "prefix_sharing_optimal", "kv_tokens", "model")
    assert [getattr(found, name) for name in names] == [getattr(here, name) for name in names]
    assert (
        found.notes[0] == "guests are taken to need 0% of the endpoint, as they have in the last hour or since it began"
    )


def test_a_job_that_was_begun_here_goes_on_at_an_endpoint_with_the_same_model(
    there: WindowServer, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"model": there.worker.options.model, "prompt": "text", "max_tokens": 8}
    llmbatch.run(source(tmp_path), tmp_path / "out", **asked)
    report = llmbatch.run(source(tmp_path), tmp_path / "out", beside=there.url, **asked)
    assert report.finished_before

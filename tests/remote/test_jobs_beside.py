"""Jobs whose engine is an endpoint elsewhere: answers, errors, retries, kills."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.responses import JSONResponse, Response

import llmbatch
from llmbatch.errors import InputError, JobError, JobStopped, ModelError, ParameterError
from llmbatch.inference.progress import Advance, Silence
from llmbatch.inference.report import Report
from llmbatch.remote.retries import Patience
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.storage.journal import Journal
from llmbatch.storage.location import Location
from tests.remote.test_concurrency import histogram
from tests.support import killing
from tests.support.endpoints import MODEL, Endpoint, HangUp, endpoint, prompt_of, refusal, text_of
from tests.support.paths import ROOT


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """An endpoint, to which nobody waits long to go back."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("llmbatch.remote.worker.PATIENCE", Patience(first=0.0, tries=3, row_tries=3))
    with endpoint() as playing:
        yield playing


def prompts(count: int = 40) -> list[str]:
    """Prompts that share beginnings with others, which are not beside them."""
    return [f"{'abcd'[i % 4] * 3} {i * 7 % count:03}" for i in range(count)]


def run(there: Endpoint, folder: Path, texts: list[str | None] | list[str] | None = None, **options: Any) -> Report:
    """Run a job on prompts."""
    if not (folder / "in.parquet").exists():
        pq.write_table(
            pa.table({"text": pa.array(prompts() if texts is None else texts, pa.string())}), folder / "in.parquet"
        )
    given = {"model": MODEL, "prompt": "text", "beside": there.url, "max_tokens": 50, **options}
    return llmbatch.run(folder / "in.parquet", folder / "out", **given)


def kept_in(work: Path) -> set[str]:
    """The prompts whose answers a job keeps in its work folder."""
    place = Location.at(str(work))
    journals = [Journal.open(place, name).records() for name in place.names() if "-journal-" in name]
    found = {prompts()[key] for records in journals for record in records for key in record["key"].to_pylist()}
    return found.union(*(pq.read_table(part)["text"].to_pylist() for part in work.glob("*.parquet.staged")))


def written(folder: Path) -> pa.Table:
    return pq.read_table(folder / "out")


def test_rows_have_the_endpoint_s_answers_in_the_columns_of_any_job(there: Endpoint, tmp_path: Path) -> None:
    report = run(there, tmp_path, ["hello", None, "hello", "a longer one"], max_tokens=7)
    assert written(tmp_path).to_pylist() == [
        {
            "text": "hello",
            "generated_text": "<hello>",
            "num_input_tokens": 5,
            "num_generated_tokens": 7,
            "num_cached_tokens": cached,
            "finish_reason": "stop",
            "error": None,
            "error_kind": None,
            "attempts": 1,
        }
        if text == "hello"
        else {
            "text": text,
            "generated_text": None,
            "num_input_tokens": 0,
            "num_generated_tokens": 0,
            "num_cached_tokens": 0,
            "finish_reason": "error",
            "error": "prompt is null",
            "error_kind": "null_prompt",
            "attempts": 0,
        }
        if text is None
        else {
            "text": text,
            "generated_text": "<a long",
            "num_input_tokens": 12,
            "num_generated_tokens": 7,
            "num_cached_tokens": 2,
            "finish_reason": "length",
            "error": None,
            "error_kind": None,
            "attempts": 1,
        }
        for text, cached in (("hello", 2), (None, 0), ("hello", 5), ("a longer one", 2))
    ]
    assert (report.rows, report.errors, report.duplicates, report.model) == (4, 1, 1, MODEL)
    assert 0 <= report.prefix_sharing_optimal < 1


def test_rows_whose_prompts_share_a_beginning_are_sent_one_after_the_other(there: Endpoint, tmp_path: Path) -> None:
    run(there, tmp_path, max_running=1)
    assert there.prompts() == sorted(prompts())


def test_no_more_rows_are_in_flight_than_was_asked_for(there: Endpoint, tmp_path: Path) -> None:
    run(there, tmp_path, max_running=3)
    assert there.most_at_once <= 3


def test_the_guests_metrics_are_looked_at_round_by_round(there: Endpoint, tmp_path: Path) -> None:
    there.metrics = lambda looks: histogram(1000 * looks, 100.0 * looks)
    run(there, tmp_path, ttft=1.0)
    assert there.looks >= 3  # before the job, and after 8 and 16 answers


def test_windows_follow_one_another_and_their_rows_keep_the_input_s_order(there: Endpoint, tmp_path: Path) -> None:
    run(there, tmp_path, window_rows=7)
    assert written(tmp_path)["generated_text"].to_pylist() == list(map(text_of, prompts()))


def test_several_answers_of_a_row_are_asked_for_one_by_one(there: Endpoint, tmp_path: Path) -> None:
    run(there, tmp_path, ["a"], n=3, temperature=1.0, seed=1)
    assert sorted(body["seed"] for _, body in there.asked) == [1, 2, 3]
    assert [choice["text"] for choice in written(tmp_path)["choices"][0].as_py()] == ["<a>"] * 3


def test_an_endpoint_that_says_when_to_come_again_is_tried_again(there: Endpoint, tmp_path: Path) -> None:
    there.reply = lambda number, body: refusal(429, "slow down", **{"retry-after": "0"}) if number < 2 else None
    run(there, tmp_path, ["a"])
    assert written(tmp_path).select(["generated_text", "attempts"]).to_pylist() == [
        {"generated_text": "<a>", "attempts": 3}
    ]


def test_a_row_waits_as_often_as_it_takes_while_others_are_answered(
    there: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbatch.remote.worker.PATIENCE", Patience(first=0.0))
    refused: list[int] = []

    def reply(number: int, body: dict[str, Any]) -> Response | None:
        if prompt_of(body) != "a" or len(refused) == 20:  # an endpoint that answers nobody is tried 16 times
            return None
        refused.append(number)
        return refusal(429, "slow down", **{"retry-after": "0"})

    there.reply = reply
    run(there, tmp_path, ["a", *(f"b {number}" for number in range(100))], max_running=2)
    assert len(refused) == 20
    assert written(tmp_path)["generated_text"].to_pylist()[0] == "<a>"


def test_a_reply_that_cannot_be_decompressed_is_tried_again(there: Endpoint, tmp_path: Path) -> None:
    squeezed = {"content-encoding": "gzip"}
    there.reply = lambda number, body: Response(b"not gzip", headers=squeezed) if number == 0 else None
    run(there, tmp_path, ["a"])
    assert written(tmp_path).select(["generated_text", "attempts"]).to_pylist() == [
        {"generated_text": "<a>", "attempts": 2}
    ]


def test_a_row_that_is_refused_has_an_error_and_the_others_go_on(there: Endpoint, tmp_path: Path) -> None:
    there.reply = lambda number, body: refusal(400, "no such thing") if prompt_of(body) == "b" else None
    run(there, tmp_path, ["a", "b", "c"])
    assert written(tmp_path).select(["generated_text", "error", "error_kind"]).to_pylist() == [
        {"generated_text": "<a>", "error": None, "error_kind": None},
        {
            "generated_text": None,
            "error": "the endpoint refused the row (400): no such thing",
            "error_kind": "parameters",
        },
        {"generated_text": "<c>", "error": None, "error_kind": None},
    ]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda: refusal(500, "broken"), "it answered 500: broken"),
        (lambda: JSONResponse({}), "its reply is no answer in OpenAI's form: {}"),
        (HangUp, "it hung up (peer closed connection without sending complete message body"),
    ],
)
def test_a_row_of_which_the_endpoint_breaks_has_an_error_after_some_tries(
    there: Endpoint, tmp_path: Path, reply: Any, reason: str
) -> None:
    there.reply = lambda number, body: reply() if prompt_of(body) == "b" else None
    run(there, tmp_path, ["a", "b", "c"])
    found = written(tmp_path).select(["generated_text", "error", "error_kind", "attempts"]).to_pylist()
    assert [row["generated_text"] for row in found] == ["<a>", None, "<c>"]
    assert found[1]["error"].startswith(f"the endpoint has no answer to the row: {reason}")
    assert (found[1]["error_kind"], found[1]["attempts"]) == ("engine", 3)


def test_a_connection_that_is_hung_up_once_costs_nothing_but_a_try(there: Endpoint, tmp_path: Path) -> None:
    there.reply = lambda number, body: HangUp() if number == 0 else None
    run(there, tmp_path, ["a"])
    assert written(tmp_path).select(["generated_text", "attempts"]).to_pylist() == [
        {"generated_text": "<a>", "attempts": 2}
    ]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            lambda: refusal(401, "bad key"),
            "the endpoint {url} refuses the key (401): set OPENAI_API_KEY, or give a file with one as api_key_file "
            "(--api-key-file); it says: bad key",
        ),
        (
            lambda: refusal(404, "gone"),
            "the endpoint {url} has no such model or path, /v1/completions (404): mend the URL (--beside) or name one "
            "of its models (--model); it says: gone",
        ),
        (
            lambda: refusal(503, "full"),
            "the endpoint {url} does not answer: it answered 503: full, 3 times in a row; start it again, and the same "
            "command goes on",
        ),
    ],
)
def test_what_no_row_gets_past_ends_the_job_and_the_same_command_goes_on(
    there: Endpoint, tmp_path: Path, reply: Any, message: str
) -> None:
    there.reply = lambda number, body: reply() if number >= 10 else None
    with pytest.raises(JobError) as caught:
        run(there, tmp_path, max_running=1)
    assert str(caught.value) == message.format(url=there.url)
    there.reply = lambda number, body: None
    there.asked.clear()
    assert run(there, tmp_path).rows_resumed == 10
    assert sorted(there.prompts()) == sorted(prompts())[10:]
    assert written(tmp_path)["generated_text"].to_pylist() == list(map(text_of, prompts()))


def test_a_row_that_takes_longer_than_it_may_has_an_error(there: Endpoint, tmp_path: Path) -> None:
    run(there, tmp_path, ["a"], row_timeout=1e-9)
    (row,) = written(tmp_path).to_pylist()
    assert row["error_kind"] == "timeout"
    assert row["error"] == (
        "a row may run for row_timeout, 1e-09 s, and the endpoint had no answer by then: "
        "raise row_timeout (--row-timeout) or lower max_tokens"
    )


class _Asking(Silence):
    """Asks a job to end when so many rows are answered."""

    def __init__(self, rows: int, stopping: StopRequest) -> None:
        self._rows, self._stopping = rows, stopping

    def advance(self, advance: Advance) -> None:
        if advance.rows >= self._rows:
            self._stopping.ask()


def test_a_job_that_is_asked_to_end_keeps_what_is_answered(
    there: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbatch.inference.answers.assembler.ROWS_AT_RISK", 1)
    stopping = StopRequest(grace=60)
    with pytest.raises(JobStopped):
        run(there, tmp_path, stopping=stopping, progress=_Asking(5, stopping), max_running=2)
    run(there, tmp_path)
    assert Counter(there.prompts()) == Counter(prompts())  # none lost, and none twice
    assert written(tmp_path)["generated_text"].to_pylist() == list(map(text_of, prompts()))


@pytest.mark.parametrize("flush", [1, 3])
def test_a_client_that_is_killed_goes_on_with_what_is_unanswered(
    there: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: int
) -> None:
    pq.write_table(pa.table({"text": prompts()}), tmp_path / "in.parquet")
    words = ["run", tmp_path / "in.parquet", "--output", tmp_path / "out", "--model", MODEL, "--prompt", "text"]
    command = [*map(str, words), "--beside", there.url, "--max-tokens", "50", "--window-rows", "16", "--quiet"]
    command += ["--max-running", "1"]
    at = killing.Moment("llmbatch.remote.received_rows:ReceivedRows.flush", call=2 + flush)
    patches = {"llmbatch.inference.answers.assembler:ROWS_AT_RISK": 4}
    assert killing.run(killing.Process(command, at, patches)).status == -9
    kept = kept_in(tmp_path / "out" / "_llmbatch")
    assert len(kept) >= 4 * flush
    assert killing.run(killing.Process(command)).status == 0
    asked = Counter(there.prompts())
    assert {text for text in prompts() if asked[text] == 1} >= kept  # and of the others who was asked before again
    assert asked.total() > len(asked) == len(prompts())
    assert written(tmp_path)["generated_text"].to_pylist() == list(map(text_of, prompts()))


def test_endpoints_share_a_job(there: Endpoint, tmp_path: Path) -> None:
    with endpoint() as other:
        run(there, tmp_path, beside=[there.url, other.url])
        assert Counter(there.prompts() + other.prompts()) == Counter(prompts())
        assert min(len(there.asked), len(other.asked)) > 0
    assert written(tmp_path)["generated_text"].to_pylist() == list(map(text_of, prompts()))


def test_an_endpoint_that_is_lost_leaves_its_rows_to_the_others(there: Endpoint, tmp_path: Path) -> None:
    with endpoint() as other:
        other.reply = lambda number, body: refusal(503, "full") if number > 2 else None
        report = run(there, tmp_path, beside=[there.url, other.url])
    assert report.errors == 0
    assert written(tmp_path)["generated_text"].to_pylist() == list(map(text_of, prompts()))


def test_the_key_comes_from_the_environment(there: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run(there, tmp_path, ["a"])
    assert there.keys == ["Bearer secret"] * 2


@pytest.mark.parametrize("key", ["schlüssel", "a b", "a\tb", "a\x07b"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(
    there: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ParameterError, match=r"^OPENAI_API_KEY must hold one key, of letters, digits and signs ") as e:
        run(there, tmp_path)
    assert key not in str(e.value)


def test_a_file_with_the_key_goes_before_the_environment(
    there: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    (tmp_path / "key").write_text("other\n")
    run(there, tmp_path, ["a"], api_key_file=tmp_path / "key")
    assert there.keys == ["Bearer other"] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "api_key_file must be a file with a key, got '{file}' ([Errno 2] No such file or directory: '{file}')"),
        ("", "api_key_file must hold one key, of letters, digits and signs without spaces, got '{file}'"),
        ("a b", "api_key_file must hold one key, of letters, digits and signs without spaces, got '{file}'"),
    ],
)
def test_a_file_without_a_key_is_refused(there: Endpoint, tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ParameterError) as caught:
        run(there, tmp_path, ["a"], api_key_file=file)
    assert str(caught.value) == message.format(file=file)


def test_a_model_that_the_endpoint_does_not_have_is_refused(there: Endpoint, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        run(there, tmp_path, ["a"], model="another")
    assert str(caught.value) == (
        f"model must be one that the endpoint {there.url} has, got 'another': it has 'a-model' (--model)"
    )


def test_a_key_that_the_endpoint_refuses_is_said_before_anything_is_begun(there: Endpoint, tmp_path: Path) -> None:
    there.models = lambda: refusal(401, "who are you")
    with pytest.raises(InputError) as caught:
        run(there, tmp_path, ["a"])
    assert str(caught.value) == (
        f"the endpoint {there.url} refuses the key (401): set OPENAI_API_KEY, or give a file with one as api_key_file "
        "(--api-key-file); it says: who are you"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("models", [lambda: Response(status_code=404), lambda: JSONResponse([])])
def test_an_endpoint_that_does_not_say_what_it_has_is_asked(there: Endpoint, tmp_path: Path, models: Any) -> None:
    there.models = models
    assert run(there, tmp_path, ["a"]).errors == 0


def test_an_endpoint_that_is_not_there_is_said_before_anything_is_begun(there: Endpoint, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        run(there, tmp_path, ["a"], beside="http://127.0.0.1:1")
    assert str(caught.value) == (
        "the endpoint http://127.0.0.1:1 cannot be reached ([Errno 111] Connection refused): start it first, or mend "
        "the URL (--beside)"
    )
    assert not (tmp_path / "out").exists()


def test_an_endpoint_of_another_kind_is_said_to_be_one(there: Endpoint, tmp_path: Path) -> None:
    class Said(Silence):
        sentences: list[str] = []  # noqa: RUF012

        def say(self, sentence: str) -> None:
            self.sentences.append(sentence)

    run(there, tmp_path, ["a"], progress=Said())
    assert Said.sentences[0] == (
        f"{there.url} is no llmbatch endpoint: rows go to it one by one, in the order of their prompts"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"logprobs": 1},
            "logprobs must be left out with beside, since an endpoint that is no llmbatch does not tell it, got 1",
        ),
        (
            {"prompt": None, "turns": "turns"},
            "turns must be left out with beside, since an endpoint that is no llmbatch does not tell it, got 'turns'",
        ),
        ({"dtype": "float32"}, "dtype must be left out with beside, since the endpoint runs the model, got 'float32'"),
        (
            {"engine": "simulated"},
            "engine must be left out with beside, since the endpoint runs the model, got 'simulated'",
        ),
        ({"beside": "gpu1:8000"}, "beside must be a URL such as http://host:8000, got 'gpu1:8000'"),
        ({"beside": "http://host:99999"}, "beside must be a URL such as http://host:8000, got 'http://host:99999'"),
        ({"beside": 3}, "beside must be a URL or a list of URLs, got 3"),
        ({"ttft": 0}, "ttft must be above 0 seconds, got 0.0"),
        ({"beside": None, "ttft": 1.0}, "ttft must be left out without beside (--beside), got 1.0"),
        ({"beside": None, "api_key_file": "k"}, "api_key_file must be left out without beside (--beside), got 'k'"),
    ],
)
def test_what_has_no_meaning_beside_an_endpoint_is_refused(
    there: Endpoint, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    pq.write_table(pa.table({"text": ["a"], "turns": [["a"]]}), tmp_path / "in.parquet")
    with pytest.raises(InputError) as caught:
        run(there, tmp_path, **options)
    assert str(caught.value) == message


def test_a_row_that_asks_for_what_is_not_told_has_an_error(there: Endpoint, tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "how": ['{"logprobs": 1}', "{}"]})
    pq.write_table(table, tmp_path / "in.parquet")
    run(there, tmp_path, sampling_params="how")
    assert written(tmp_path).select(["generated_text", "error"]).to_pylist() == [
        {
            "generated_text": None,
            "error": "logprobs must be left out with beside, since an endpoint that is no llmbatch does not tell it",
        },
        {"generated_text": "<b>", "error": None},
    ]


def test_a_batch_file_is_answered_in_its_form(there: Endpoint, tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    llmbatch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=MODEL, beside=there.url)
    (answered,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert answered["response"]["body"]["choices"][0]["message"]["content"] == "<hi>"


def test_an_operator_asks_an_endpoint(there: Endpoint) -> None:
    answer = llmbatch.LLMOperator(model=MODEL, prompt="text", beside=there.url)
    assert answer(pa.table({"text": ["a", "b"]}))["generated_text"].to_pylist() == ["<a>", "<b>"]
    reader = answer.stream(pa.table({"text": ["c", "d", "e"]}), window_rows=2)
    assert reader.read_all()["generated_text"].to_pylist() == ["<c>", "<d>", "<e>"]


def test_a_job_at_an_endpoint_imports_no_torch(there: Endpoint, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": prompts()}), tmp_path / "in.parquet")
    program = (
        "import sys, llmbatch; "
        f"llmbatch.run({str(tmp_path / 'in.parquet')!r}, {str(tmp_path / 'out')!r}, model={MODEL!r}, prompt='text', "
        f"beside={there.url!r}); print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_an_endpoint_of_another_kind_does_not_forecast(there: Endpoint, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "in.parquet")
    with pytest.raises(ParameterError) as caught:
        llmbatch.explain(tmp_path / "in.parquet", model=MODEL, prompt="text", beside=there.url)
    assert str(caught.value) == (
        f"beside must name endpoints of llmbatch for explain, since others do not forecast, got ({there.url!r},)"
    )


def test_actors_of_map_dataset_have_engines() -> None:
    data = pytest.importorskip("ray.data")
    answer: Any = llmbatch.LLMOperator(model=MODEL, prompt="text", beside="http://there:1")
    ds = Mock(spec=data.Dataset)  # nothing looks at it
    with pytest.raises(ParameterError) as caught:
        llmbatch.map_dataset(ds, answer, concurrency=1)
    assert str(caught.value) == (
        "beside must be left out of an operator for map_dataset, whose actors have engines, got ('http://there:1',): "
        "ds.map_batches(op, concurrency=1) asks an endpoint"
    )

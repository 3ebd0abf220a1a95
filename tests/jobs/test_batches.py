"""OpenAI batches as jobs: lines in, lines out; judged by the types of OpenAI's client."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import llmbatch
from llmbatch.cli.main import main
from llmbatch.errors import DataError, InputError
from llmbatch.inference.progress import Silence
from llmbatch.io.reading.dataset import Dataset
from llmbatch.openai.answers import answer_lines, error_lines, line_columns, response_lines
from llmbatch.openai.requests import request_lines
from tests.support.batches import CHAT, COMPLETIONS, every_field, line, read, write
from tests.support.killing import Moment, Process, run
from tests.support.models import TOOLS_TEMPLATE, tiny_model_folder
from tests.support.s3 import S3Server, s3_fixture  # noqa: F401

STEP = "llmbatch.engine.recorded:RecordedEngine.execute"
STAGE = "llmbatch.io.writing.output:Output.stage"
MOVE = "llmbatch.storage.location:Location.move"
ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_memory": 2**24}
CREATED = {"created": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama", chat_template=TOOLS_TEMPLATE)


@pytest.fixture(scope="module")
def answered(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five hundred lines of every field, answered by a tiny model: requests.jsonl, answers.jsonl."""
    folder = tmp_path_factory.mktemp("answered")
    llmbatch.run(write(folder / "requests.jsonl", every_field(500)), folder / "answers.jsonl", model=model, **ENGINE)
    return folder


def undated(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines without the second in which they were written, and without what depends on the rows beside them."""
    for one in lines:
        body = one["response"] and one["response"]["body"]
        if body and "usage" in body:
            body.update(CREATED)
            body["usage"]["prompt_tokens_details"] = None
    return lines


def check_bodies(lines: list[dict[str, Any]]) -> None:
    """Check that lines have the answers that their requests ask for, by the types of OpenAI's client."""
    types, asked = pytest.importorskip("openai.types"), {one["custom_id"]: one for one in every_field(500)}
    for one in lines:
        assert set(one) == {"id", "custom_id", "response", "error"}
        response, request = one["response"], asked[one["custom_id"]]
        assert (one["error"], response["status_code"]) == (None, 200)
        kind = types.chat.ChatCompletion if request["url"] == CHAT else types.Completion
        body = kind.model_validate(response["body"], strict=True)
        assert len(body.choices) == request["body"].get("n", 1)
        assert body.usage.total_tokens == body.usage.prompt_tokens + body.usage.completion_tokens
        assert body.usage.prompt_tokens_details.cached_tokens >= 0
        given = request["body"].get("logprobs")
        told = given is not None and given is not False
        assert all((choice.logprobs is not None) == told for choice in body.choices)


def test_every_body_is_what_openais_client_reads(answered: Path) -> None:
    lines = read(answered / "answers.jsonl")
    assert read(answered / "answers.errors.jsonl") == []
    assert [one["custom_id"] for one in lines] == [one["custom_id"] for one in every_field(500)]
    assert len({one["id"] for one in lines}) == 500
    check_bodies(lines)


def test_what_is_told_of_tokens_is_as_much_as_was_asked(answered: Path) -> None:
    bodies = {one["custom_id"]: one["response"]["body"] for one in read(answered / "answers.jsonl")}
    for request in every_field(500):
        asked, body = request["body"], bodies[request["custom_id"]]
        for choice in body["choices"]:
            if asked.get("top_logprobs"):
                assert {len(one["top_logprobs"]) for one in choice["logprobs"]["content"]} == {asked["top_logprobs"]}
            elif request["url"] == COMPLETIONS and "logprobs" in asked:
                told = choice["logprobs"]
                assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"])
                assert all(token in top for token, top in zip(told["tokens"], told["top_logprobs"], strict=True))
        if "prompt_logprobs" in asked:
            told = body["prompt_logprobs"] if request["url"] == CHAT else body["choices"][0]["prompt_logprobs"]
            assert (told[0], len(told)) == (None, body["usage"]["prompt_tokens"])


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"temperature": 1.0, "seed": 5, "n": 2}, {"temperature": 1.0, "seed": 5, "n": 2}),
        ({"logit_bias": {"65": 100}, "stop": "AAAA"}, {"logit_bias": {65: 100}, "stop": "AAAA"}),
        ({"frequency_penalty": 1.5, "logprobs": 2}, {"frequency_penalty": 1.5, "logprobs": 2}),
    ],
)
def test_a_line_gets_the_answer_that_a_row_gets(
    model: str, tmp_path: Path, body: dict[str, Any], options: dict[str, Any]
) -> None:
    write(tmp_path / "in.jsonl", [line("a", prompt="once upon", **body)])
    llmbatch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=model, **ENGINE)
    row = llmbatch.LLMOperator(model=model, prompt="p", max_tokens=6, **options, **ENGINE)(
        pa.table({"p": ["once upon"]})
    ).to_pylist()[0]
    [found] = read(tmp_path / "out.jsonl")
    choices = found["response"]["body"]["choices"]
    kept = row.get("choices") or [{"text": row["generated_text"], "finish_reason": row["finish_reason"]}]
    assert [(one["text"], one["finish_reason"]) for one in choices] == [
        (one["text"], one["finish_reason"]) for one in kept
    ]
    if "logprobs" in body:
        told = [one["logprob"] for one in row["logprobs"]]
        assert choices[0]["logprobs"]["token_logprobs"] == told


def test_a_chat_gets_the_answer_that_a_row_of_messages_gets(model: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    write(tmp_path / "in.jsonl", [line("a", CHAT, messages=messages)])
    llmbatch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=model, **ENGINE)
    row = llmbatch.LLMOperator(model=model, messages="m", max_tokens=6, **ENGINE)(pa.table({"m": [messages]}))
    [found] = read(tmp_path / "out.jsonl")
    body = found["response"]["body"]
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": row["generated_text"][0].as_py(), "refusal": None
    }  # fmt: skip  # one row
    assert body["usage"]["prompt_tokens"] == row["num_input_tokens"][0].as_py()


# Lines that fail


def test_lines_that_fail_go_to_a_file_beside(model: str, tmp_path: Path) -> None:
    lines = [
        line("a"), line("b", temprature=1), {**line("c"), "method": "GET"}, line("a"), line(None),
        line("long", prompt="x" * 1000), line("d", temperature=-1), line("e", CHAT, messages=[{"role": "cat"}]),
    ]  # fmt: skip  # one row
    write(tmp_path / "in.jsonl", lines)
    report = llmbatch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=model, engine="simulated")
    assert (report.rows, report.errors) == (8, 7)
    assert [one["custom_id"] for one in read(tmp_path / "out.jsonl")] == ["a"]
    failed = read(tmp_path / "out.errors.jsonl")
    assert [one["custom_id"] for one in failed] == ["b", "c", "a", None, "long", "d", "e"]
    assert {one["response"]["status_code"] for one in failed} == {400}
    reasons = [one["response"]["body"]["error"] for one in failed]
    assert {reason["type"] for reason in reasons} == {"invalid_request_error"}
    assert [reason["param"] for reason in reasons] == [
        "temprature", "method", "custom_id", "custom_id", "prompt", "temperature", "messages",
    ]  # fmt: skip  # one row
    assert [reason["code"] for reason in reasons[3:]] == [
        "invalid_value", "context_length_exceeded", "invalid_value", "messages"
    ]  # fmt: skip  # one row
    assert reasons[2]["message"] == "custom_id must be another in each line, got that of line 1 again"


def test_a_number_as_custom_id_is_the_error_of_its_line_alone(model: str, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a"), {**line("b"), "custom_id": 5}, {**line("c"), "method": ["POST"]}])
    report = llmbatch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=model, engine="simulated")
    assert (report.rows, report.errors) == (3, 2)
    number, method = read(tmp_path / "out.errors.jsonl")
    said = number["response"]["body"]["error"]["message"]
    assert said == "custom_id must be text by which the line is known, got none or no text: put a number in quotes"
    assert (method["custom_id"], method["response"]["body"]["error"]["param"]) == ("c", "method")


@pytest.mark.parametrize("between", [0, 400])  # lines: of one block, and of two
def test_fields_beside_those_of_a_line_may_hold_anything(model: str, tmp_path: Path, between: int) -> None:
    others = [line(f"line-{number}", prompt="a" * 400) for number in range(between)]
    extras: list[Any] = [1, "text", {"a": 1}, [0.5], 2**70, None]
    lines = [{**line(f"extra-{number}"), "extra": extra} for number, extra in enumerate(extras)]
    write(tmp_path / "in.jsonl", [lines[0], *others, *lines[1:]])
    asked: dict[str, Any] = {"model": model, "engine": "simulated"}
    report = llmbatch.run(tmp_path / "in.jsonl", tmp_path / "out.parquet", **asked)
    assert (report.rows, report.errors) == (len(others) + len(lines), 0)
    found = pq.read_table(tmp_path / "out.parquet")["extra"].to_pylist()
    assert [json.loads(one) for one in found if one is not None] == extras[:-1]


def test_fields_beside_those_of_a_line_may_have_names_of_answers(model: str, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a"), {**line("b"), "generated_text": "x", "error": 1, "choices": []}])
    asked: dict[str, Any] = {"model": model, "engine": "simulated"}
    llmbatch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **asked)
    assert [one["custom_id"] for one in read(tmp_path / "out.jsonl")] == ["a", "b"]
    with pytest.raises(InputError, match="the input has a column 'generated_text', and llmbatch writes one"):
        llmbatch.run(tmp_path / "in.jsonl", tmp_path / "out.parquet", **asked)


def test_what_the_engine_failed_at_has_an_error_and_no_response() -> None:
    columns = {"custom_id": "a", "method": "POST", "url": CHAT, "body": "{}"}
    answer = {"num_input_tokens": 1, "num_cached_tokens": 0, "choices": None, "prompt_logprobs": None}
    table = pa.Table.from_pylist([{**columns, **answer, "error": "too slow", "error_kind": "timeout"}])
    [found] = map(json.loads, error_lines(table, 0, CREATED))
    assert (found["response"], found["error"]) == (None, {"code": "timeout", "message": "too slow"})
    assert list(answer_lines(table, 0, CREATED)) == []


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_an_id_that_is_not_utf8_is_null_in_the_line_of_its_error(model: str, tmp_path: Path, name: str) -> None:
    table = pa.Table.from_pylist([{**one, "body": json.dumps(one["body"])} for one in (line("a"), line("b"))])
    ids = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(table.set_column(0, "custom_id", ids), tmp_path / "in.parquet")
    out = tmp_path / name
    llmbatch.run(tmp_path / "in.parquet", out, model=model, engine="simulated", output_format="openai")
    if name == "out.jsonl":
        [failed] = read(tmp_path / "out.errors.jsonl")
    else:
        [failed] = map(json.loads, response_lines(pq.read_table(tmp_path / "out.errors.parquet")))
    assert failed["custom_id"] is None
    assert "is not UTF-8" in failed["response"]["body"]["error"]["message"]


def test_a_model_without_a_chat_template_answers_its_completions(tmp_path: Path) -> None:
    raw = tiny_model_folder(tmp_path / "raw", "llama")
    write(tmp_path / "in.jsonl", [line("a", CHAT), line("b")])
    llmbatch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=raw, engine="simulated")
    assert [one["custom_id"] for one in read(tmp_path / "out.jsonl")] == ["b"]
    [failed] = read(tmp_path / "out.errors.jsonl")
    assert "has no chat template" in failed["response"]["body"]["error"]["message"]


def test_the_model_that_a_line_names_is_not_looked_at_and_a_note_says_so(model: str, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a", model="gpt-4o"), line("b", model=model), line("c")])
    report = llmbatch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=model, engine="simulated")
    assert f"lines ask for 'gpt-4o': {model} answers them" in report.notes
    assert "where a line has no max_tokens: answers end after at most 512 tokens" in report.notes
    assert {one["response"]["body"]["model"] for one in read(tmp_path / "out.jsonl")} == {model}


# Lines, Parquet, and lines again


def test_requests_become_parquet_and_lines_again_and_lose_nothing(tmp_path: Path) -> None:
    lines = every_field(500)
    source = Dataset.resolve([str(write(tmp_path / "in.jsonl", lines))], json_columns=("body",))
    pq.write_table(source.read(), tmp_path / "in.parquet")
    assert [json.loads(text) for text in request_lines(pq.read_table(tmp_path / "in.parquet"))] == lines


@pytest.mark.parametrize("name", ["in.parquet", "in.jsonl.gz"])
def test_an_input_of_another_format_has_the_same_answers(answered: Path, model: str, tmp_path: Path, name: str) -> None:
    if name == "in.parquet":
        source = Dataset.resolve([str(answered / "requests.jsonl")], json_columns=("body",))
        pq.write_table(source.read(), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(gzip.compress((answered / "requests.jsonl").read_bytes()))
    llmbatch.run(tmp_path / name, tmp_path / "out.jsonl", model=model, **ENGINE)
    assert undated(read(tmp_path / "out.jsonl")) == undated(read(answered / "answers.jsonl"))


def test_answers_in_columns_are_the_lines_once_more(answered: Path, model: str, tmp_path: Path) -> None:
    llmbatch.run(answered / "requests.jsonl", tmp_path / "out.parquet", model=model, **ENGINE)
    columns = pq.read_table(tmp_path / "out.parquet")
    assert columns.column_names[:5] == ["custom_id", "method", "url", "body", "generated_text"]
    assert [json.loads(text) for text in request_lines(columns)] == every_field(500)
    again = [json.loads(text) for text in answer_lines(columns, 0, {"model": model, **CREATED})]
    assert undated(again) == undated(read(answered / "answers.jsonl"))


def test_lines_in_parquet_go_back_to_lines_and_lose_nothing(answered: Path, model: str, tmp_path: Path) -> None:
    llmbatch.run(answered / "requests.jsonl", tmp_path / "out.parquet", model=model, output_format="openai", **ENGINE)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["id", "custom_id", "response", "error"]
    (tmp_path / "again.jsonl").write_text("".join(response_lines(table)))
    check_bodies(read(tmp_path / "again.jsonl"))
    assert undated(read(tmp_path / "again.jsonl")) == undated(read(answered / "answers.jsonl"))
    assert pq.read_table(tmp_path / "out.errors.parquet").num_rows == 0


def test_the_text_of_a_line_is_that_which_was_put_into_columns(answered: Path) -> None:
    lines = (answered / "answers.jsonl").read_text().splitlines(keepends=True)
    assert list(response_lines(line_columns(lines))) == lines


def test_a_body_of_structs_goes_back_to_a_line(answered: Path) -> None:
    lines = [one for one in read(answered / "answers.jsonl") if "prompt_logprobs" not in str(one)]
    chats = [one for one in lines if one["response"]["body"]["object"] == "chat.completion"]
    check_bodies([json.loads(text) for text in response_lines(pa.Table.from_pylist(chats))])


def test_failed_lines_in_parquet_lie_beside_and_a_mended_one_runs_alone(model: str, tmp_path: Path) -> None:
    out: dict[str, Any] = {"output": tmp_path / "out.parquet", "output_format": "openai", "model": model, **ENGINE}
    llmbatch.run(write(tmp_path / "in.jsonl", [line("a"), line("b", nonsense=1)]), **out)
    [failed] = map(json.loads, response_lines(pq.read_table(tmp_path / "out.errors.parquet")))
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("b", 400)
    assert failed["response"]["body"]["error"]["param"] == "nonsense"
    assert llmbatch.run(tmp_path / "in.jsonl", **out).finished_before
    write(tmp_path / "in.jsonl", [line("a"), line("b")])
    mended = llmbatch.run(tmp_path / "in.jsonl", **out, changed_rows="answer")
    assert (mended.rows_resumed, mended.errors) == (1, 0)
    assert pq.read_table(tmp_path / "out.parquet")["custom_id"].to_pylist() == ["a", "b"]


def test_columns_may_be_asked_for_in_jsonl_too(model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("a"), line("b", nonsense=1)])
    llmbatch.run(source, tmp_path / "out.jsonl", model=model, engine="simulated", output_format="columns")
    found = read(tmp_path / "out.jsonl")
    assert [{name: one[name] for name in line("a")} for one in found] == read(source)
    assert [one["error"] is None for one in found] == [True, False]
    assert not (tmp_path / "out.errors.jsonl").exists()


# Jobs as ever


@pytest.mark.parametrize(
    "at",
    [
        Moment(STEP, 3),
        Moment(STAGE, 1),
        Moment(STAGE, 2, after=True),
        *(Moment(MOVE, call) for call in range(4)),
    ],
)
def test_a_batch_that_is_killed_goes_on_and_its_lines_are_right(model: str, tmp_path: Path, at: Moment) -> None:
    lines = [line(f"row-{number}", CHAT if number % 2 else COMPLETIONS, n=1 + number % 2) for number in range(60)]
    lines[7]["body"]["nonsense"] = 1
    source = write(tmp_path / "in.jsonl", lines)
    command = ["run", str(source), "--model", model, "--engine", "simulated", "--quiet", "--window-rows", "20"]
    command += ["--kv-memory", "4MiB", "--max-running", "16", "--dtype", "float32"]
    out = tmp_path / "out.jsonl"
    assert main([*command, "--output", str(tmp_path / "whole.jsonl")]) == 0
    killed = Process([*command, "--output", str(out)], at, {"llmbatch.inference.answers.assembler:ROWS_AT_RISK": 5})
    assert run(killed).status == -signal.SIGKILL
    assert main([*command, "--output", str(out)]) == 0
    for name in ("{}.jsonl", "{}.errors.jsonl"):
        found, whole = (read(tmp_path / name.format(each)) for each in ("out", "whole"))
        assert undated(found) == undated(whole)
    assert not (tmp_path / "out.jsonl._llmbatch").exists()
    assert len(read(out)) == 59


def test_a_finished_batch_is_found_finished(model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("a")])
    for finished in (False, True):
        report = llmbatch.run(source, tmp_path / "out.jsonl", model=model, engine="simulated")
        assert report.finished_before is finished


def test_a_batch_lies_on_an_object_store_and_so_do_its_lines(model: str, tmp_path: Path, s3: S3Server) -> None:
    bucket, lines = s3.bucket("batches"), [line("a"), line("b", nonsense=1)]
    store = fsspec.filesystem("s3", **s3.storage_options)
    store.put_file(str(write(tmp_path / "in.jsonl", lines)), f"{bucket}/in.jsonl")
    given: dict[str, Any] = {"model": model, "engine": "simulated", "storage_options": s3.storage_options}
    for finished in (False, True):
        report = llmbatch.run(f"{bucket}/in.jsonl", f"{bucket}/out.jsonl", **given)
        assert (report.errors, report.finished_before) == (1, finished)
    for name, custom_id in (("out.jsonl", "a"), ("out.errors.jsonl", "b")):
        [found] = map(json.loads, store.cat_file(f"{bucket}/{name}").splitlines())
        assert found["custom_id"] == custom_id


def test_a_mended_line_of_a_finished_batch_runs_alone(model: str, tmp_path: Path) -> None:
    lines, out = [line("a"), line("b", nonsense=1), line("c", n=2, logprobs=1), line("a")], tmp_path / "out.jsonl"
    llmbatch.run(write(tmp_path / "in.jsonl", lines), out, model=model, **ENGINE)
    before = read(out)
    again = llmbatch.run(tmp_path / "in.jsonl", out, model=model, retry_errors=True, **ENGINE)
    assert (again.rows_resumed, again.errors) == (2, 2)
    assert undated(read(out)) == undated(before)
    write(tmp_path / "in.jsonl", [lines[0], line("b"), lines[2], line("d")])
    mended = llmbatch.run(tmp_path / "in.jsonl", out, model=model, changed_rows="answer", **ENGINE)
    assert (mended.rows_resumed, mended.errors) == (2, 0)
    assert [one["custom_id"] for one in read(out)] == ["a", "b", "c", "d"]
    assert [one for one in undated(read(out)) if one["custom_id"] in "ac"] == undated(before)
    assert read(tmp_path / "out.errors.jsonl") == []


def test_a_batch_is_not_gone_on_with_where_its_columns_are_gone(model: str, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [line("a", nonsense=1)]), tmp_path / "out.jsonl"
    llmbatch.run(source, out, model=model, engine="simulated")
    (tmp_path / "out.jsonl._llmbatch.arrow").unlink()
    with pytest.raises(DataError, match=r"out\.jsonl\._llmbatch\.arrow, which holds the rows of"):
        llmbatch.run(source, out, model=model, engine="simulated", retry_errors=True)


def test_the_errors_of_an_earlier_batch_go_with_it(model: str, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [line("a", nonsense=1), line("b")]), tmp_path / "out.jsonl"
    llmbatch.run(source, out, model=model, engine="simulated")
    llmbatch.run(source, out, model=model, engine="simulated", restart=True, output_format="columns")
    assert len(read(out)) == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl._llmbatch.json"]


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl"])
def test_a_file_that_came_while_the_job_ran_is_not_replaced(model: str, tmp_path: Path, name: str) -> None:
    class Foreign(Silence):
        """Something else writes a file while the job runs."""

        def start(self, rows: int) -> None:
            (tmp_path / name).write_text("a thesis")

    source, out = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl"
    with pytest.raises(DataError, match=rf"^{name} came to the output .* while the job ran, and is not the job's"):
        llmbatch.run(source, out, model=model, engine="simulated", progress=Foreign())
    assert (tmp_path / name).read_text() == "a thesis"
    (tmp_path / name).unlink()
    assert llmbatch.run(source, out, model=model, engine="simulated").rows_resumed == 1


@pytest.mark.parametrize("there", ["out.jsonl", "out.errors.jsonl"])
def test_a_file_of_others_is_not_replaced(model: str, tmp_path: Path, there: str) -> None:
    source = write(tmp_path / "in.jsonl", [line("a")])
    (tmp_path / there).write_text("mine")
    with pytest.raises(DataError, match="is already there"):
        llmbatch.run(source, tmp_path / "out.jsonl", model=model, engine="simulated")
    assert (tmp_path / there).read_text() == "mine"
    llmbatch.run(source, tmp_path / "out.jsonl", model=model, engine="simulated", overwrite=True)


def test_errors_are_not_written_over_an_input(model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "out.errors.jsonl", [line("a")])
    with pytest.raises(DataError, match=r"the errors of .* are written to"):
        llmbatch.run(source, tmp_path / "out.jsonl", model=model, engine="simulated")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": None}, "model must be text or a Path, got None"),
        ({"chat": True}, "chat must be left out for a batch, whose lines say what is asked, got True"),
        ({"continuation": "body"}, "continuation must be left out for a batch"),
        ({"sampling_params": "body"}, "sampling_params must be left out for a batch"),
        ({"output": "out", "output_format": "openai"}, "output_format must be 'columns' for an output that is a"),
        ({"prompt": "url", "output_format": "openai"}, "output_format must be 'columns' for rows that are no OpenAI"),
        ({"output_format": "lines"}, "output_format must be one of auto, openai, columns, got 'lines'"),
    ],
)
def test_a_command_that_does_not_go_with_a_batch_is_refused(
    model: str, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    source = write(tmp_path / "in.jsonl", [line("a")])
    given = {"output": "out.jsonl", "model": model, **options}
    with pytest.raises(InputError, match=said):
        llmbatch.run(source, str(tmp_path / given.pop("output")), engine="simulated", **given)


def test_a_batch_needs_a_model(tmp_path: Path) -> None:
    call: Any = llmbatch.run
    with pytest.raises(InputError, match="model must be given"):
        call(write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl")


def test_what_a_batch_will_take_is_forecast(model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("a"), line("b", CHAT), line("c", nonsense=1)])
    found = llmbatch.explain(source, model=model, engine="simulated")
    assert (found.rows, found.errors) == (3, 1)

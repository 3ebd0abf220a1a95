"""`llmbatch serve` with a model: guests and batches on one engine, and its answers are those of `run`."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

import llmbatch
from llmbatch.cli.main import main
from llmbatch.errors import ParameterError
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Silence
from llmbatch.inference.worker import Worker
from llmbatch.preprocess.tokenization import loading
from llmbatch.preprocess.tokenization.loading import load_tokenizer
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.serving.options import ServingOptions, split_options
from llmbatch.serving.serve import _late_prompts
from tests.support.batches import CHAT, COMPLETIONS, line, read, write

ASKED: tuple[dict[str, Any], ...] = (
    {}, {"stop": ["e", "st"]}, {"n": 2, "temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"logit_bias": {"70": 5}}, {"presence_penalty": 1.5, "min_tokens": 3}, {"stop_token_ids": [66, 67, 68, 69, 70]},
)  # fmt: skip  # a table
LINES = [
    line(f"{url}-{number}", url, **{**asked, "max_tokens": 24})
    for url in (CHAT, COMPLETIONS)
    for number, asked in enumerate(ASKED)
]
MODEL: dict[str, Any] = {"dtype": "float32", "kv_memory": 2**22}


class _Listening(Silence):
    """Hands on where an endpoint listens."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def say(self, sentence: str) -> None:
        if sentence.startswith("listening at "):
            self.said.put(sentence.split()[2])


@contextmanager
def serving(**options: Any) -> Iterator[OpenAI]:
    """A client of an endpoint in another thread, whatever it is asked."""
    progress, stopping = _Listening(), StopRequest()
    thread = threading.Thread(
        target=lambda: llmbatch.serve(progress=progress, stopping=stopping, port=0, **options), daemon=True
    )
    thread.start()
    try:
        url = progress.said.get(timeout=300)
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            yield client
    finally:
        stopping.ask()
        thread.join()


@pytest.fixture(scope="module")
def client(chatting: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of an endpoint with a tiny model."""
    with serving(model=chatting, state_dir=tmp_path_factory.mktemp("state"), **MODEL) as found:
        yield found


@pytest.fixture(scope="module")
def expected(chatting: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `run` answers to the same lines: the body of each response."""
    folder = tmp_path_factory.mktemp("run")
    llmbatch.run(write(folder / "in.jsonl", LINES), folder / "out.jsonl", model=chatting, **MODEL)
    return {one["custom_id"]: one["response"]["body"] for one in read(folder / "out.jsonl")}


def choices_of(body: dict[str, Any]) -> list[tuple[str, str]]:
    """The text and the reason of each choice."""
    return [
        (choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"])
        for choice in body["choices"]
    ]


def ask(client: OpenAI, asked: dict[str, Any], **more: Any) -> Any:
    """The response to a line, as the client has it."""
    return client.post(asked["url"].removeprefix("/v1"), body={**asked["body"], **more}, cast_to=object)


@pytest.mark.parametrize("asked", LINES, ids=lambda asked: asked["custom_id"])
def test_a_request_is_answered_as_a_line_of_a_batch_is(
    client: OpenAI, expected: dict[str, dict[str, Any]], asked: dict[str, Any]
) -> None:
    body, before = ask(client, asked), expected[asked["custom_id"]]
    assert choices_of(body) == choices_of(before)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert body["usage"][name] == before["usage"][name]


def test_requests_that_come_together_are_answered_as_each_alone(
    client: OpenAI, expected: dict[str, dict[str, Any]]
) -> None:
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda asked=asked: found.update({asked["custom_id"]: ask(client, asked)}))
        for asked in LINES
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: choices_of(body) for name, body in found.items()} == {
        name: choices_of(body) for name, body in expected.items()
    }


@pytest.mark.parametrize("asked", LINES, ids=lambda asked: asked["custom_id"])
def test_a_stream_is_the_answer_in_pieces(
    client: OpenAI, expected: dict[str, dict[str, Any]], asked: dict[str, Any]
) -> None:
    url = f"{client.base_url}{asked['url'].removeprefix('/v1/')}"
    answer = httpx.post(url, json={**asked["body"], "stream": True}, timeout=300)
    events = [text.removeprefix("data: ") for text in answer.text.split("\n\n")[:-2]]
    pieces: dict[int, str] = {}
    for event in map(json.loads, events):
        for choice in event["choices"]:
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            pieces[choice["index"]] = pieces.get(choice["index"], "") + piece
    whole = [text for text, _ in choices_of(expected[asked["custom_id"]])]
    assert [pieces[index] for index in range(len(whole))] == whole


def test_log_probabilities_are_told(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    asked: Any = {"model": client.models.list().data[0].id, "messages": messages, "max_tokens": 4}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [len(one.top_logprobs) for one in told.content] == [2] * 4
    *_, last = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
    assert last.choices[0].logprobs is not None
    assert [one.token for one in last.choices[0].logprobs.content or []] == [one.token for one in told.content]


def test_clients_that_hang_up_leave_nothing_behind(client: OpenAI) -> None:
    asked: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}, "stream": True}
    model = client.models.list().data[0].id
    streams = [client.completions.create(model=model, prompt=f"{number} say", **asked) for number in range(20)]
    for stream in streams:
        next(iter(stream))
        stream.close()
    health = str(client.base_url).removesuffix("/v1/") + "/metrics"
    empty = {f'llmbatch:num_requests_{kind}{{model_name="{model}"}} 0.0' for kind in ("running", "waiting")}
    until = time.monotonic() + 120
    while not empty <= set(httpx.get(health).text.splitlines()):
        assert time.monotonic() < until


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_a_batch_beside_guests_is_answered_as_run_answers_it(
    client: OpenAI, expected: dict[str, dict[str, Any]], url: Any
) -> None:
    content = "".join(json.dumps(one) + "\n" for one in LINES if one["url"] == url).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    while (found := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        ask(client, LINES[0])
    assert (found.errors, found.output_file_id is not None) == (None, True)
    assert found.output_file_id is not None
    answers = [json.loads(text) for text in client.files.content(found.output_file_id).text.splitlines()]
    assert {one["custom_id"]: choices_of(one["response"]["body"]) for one in answers} == {
        name: choices_of(body) for name, body in expected.items() if name.startswith(url)
    }


def test_lines_of_a_batch_that_ask_for_another_url_or_model_are_refused_as_live_ones_are(client: OpenAI) -> None:
    lines = [line("a", model="gpt-4"), line("b", CHAT), line("c")]
    content = "".join(json.dumps(one) + "\n" for one in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while (found := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        pass
    assert found.error_file_id is not None
    errors = [json.loads(text) for text in client.files.content(found.error_file_id).text.splitlines()]
    told = {one["custom_id"]: one["response"]["body"]["error"]["param"] for one in errors}
    assert told == {"a": "model", "b": "url"}


def test_a_simulated_engine_says_how_many_tokens_an_answer_has(chatting: str, tmp_path: Path) -> None:
    with serving(model=chatting, engine="simulated", state_dir=tmp_path, max_tokens=9) as client:
        assert choices_of(ask(client, line("a", max_tokens=7))) == [("7 simulated tokens", "length")]
        *pieces, last = client.completions.create(model=chatting, prompt="a", stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == "9 simulated tokens"
        assert last.choices[0].finish_reason == "length"


def test_what_chats_need_is_loaded_before_an_endpoint_listens(
    chatting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(folder: str, *, name: str) -> Tokenizer:
        loaded.append(name)
        return load_tokenizer(folder, name=name)

    monkeypatch.setattr(loading, "load_tokenizer", load)
    with serving(model=chatting, engine="simulated", state_dir=tmp_path) as client:
        assert loaded == [chatting]
        ask(client, line("a", CHAT))
    assert loaded == [chatting]


def test_help_has_no_option_that_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "--output-tokens" not in capfd.readouterr().out


def test_a_port_in_use_is_one_sentence(chatting: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", chatting, "--port", str(port)]) == 2
    assert capfd.readouterr().err == (
        f"llmbatch: port must be one that 127.0.0.1 has free, got {port}: address already in use, choose another "
        "(--port)\n"
    )


def test_a_host_that_is_none_is_one_sentence(chatting: str) -> None:
    with pytest.raises(ParameterError, match=r"^host must be an address of this machine, got 'a\.\.b': "):
        llmbatch.serve(model=chatting, host="a..b")


def test_times_that_the_device_cannot_keep_are_refused(chatting: str, tmp_path: Path) -> None:
    for name in ("ttft", "tpot"):
        with pytest.raises(ParameterError, match=rf"^{name} must be at least .* s, which a step of one token takes"):
            llmbatch.serve(model=chatting, port=0, state_dir=tmp_path, **{**MODEL, name: 1e-12})


def test_prompts_that_take_longer_than_a_first_token_may_are_told_of(chatting: str) -> None:
    worker = Worker.open(Options.of_batch(model=chatting, **MODEL))
    tokens = worker.model.context_length  # less than what is usual
    seconds = worker.cost.step_time(tokens, tokens * (tokens + 1) / 2, float(tokens), 1)
    assert _late_prompts(ServingOptions(ttft=2 * seconds), worker) == ()
    ttft = seconds / 2
    assert _late_prompts(ServingOptions(ttft=ttft), worker) == (
        f"a prompt of {tokens} tokens takes {seconds:.2g} s on this device, more than ttft={ttft:g}",
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": 70_000}, "port must be at most 65535, got 70000"),
        ({"ttft": 0}, "ttft must be above 0 seconds, got 0.0"),
        ({"tpot": -1}, "tpot must be above 0 seconds, got -1.0"),
        ({"max_waiting": 0}, "max_waiting must be at least 1, got 0"),
        ({"grace": -1}, "grace must be at least 0 seconds, got -1.0"),
        ({"output_tokens": "n"}, "output_tokens must be left out, since no table is answered, got 'n'"),
    ],
)
def test_an_option_is_refused_by_its_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        split_options({"model": "m", **given})
    assert str(caught.value) == message


def test_no_option_is_offered_that_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"^an option must be .*, got 'prt': did you mean port\?$") as caught:
        split_options({"model": "m", "prt": 3})
    assert "output_tokens" not in str(caught.value)


def test_a_file_of_keys_must_hold_one(chatting: str, tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    with pytest.raises(ParameterError, match=r"^api_key_file must be a file of keys, got .*: No such file"):
        llmbatch.serve(model=chatting, api_key_file=empty)
    empty.write_text("\n \n")
    with pytest.raises(ParameterError, match=r"^api_key_file must hold a key, got .*, which is empty$"):
        llmbatch.serve(model=chatting, api_key_file=empty)


def test_a_missing_extra_says_what_to_install(chatting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmbatch.serving.serve.find_spec", lambda name: None)
    with pytest.raises(ParameterError, match=r"which cannot be imported: pip install 'llmbatch\[serve\]'$"):
        llmbatch.serve(model=chatting)


@contextmanager
def process(model: str, state: Path) -> Iterator[tuple[subprocess.Popen[str], OpenAI]]:
    """An endpoint in a process of its own, and a client of it."""
    command = [sys.executable, "-m", "llmbatch", "serve", "--model", model, "--port", "0", "--state-dir", str(state)]
    command += ["--dtype", "float32", "--kv-memory", "4MiB", "--max-running", "4"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as run:
        assert run.stderr is not None
        url = next(text.split()[3] for text in run.stderr if "listening at" in text)
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            try:
                yield run, client
            finally:
                run.kill()


@pytest.mark.slow
def test_a_known_model_answers_and_streams_as_run_answers(smollm2: str, tmp_path: Path) -> None:
    questions = ("What is the capital of France?", "Count to five.", "Écris un mot: été 🙂", "Say yes or no.")
    lines = [
        line(f"line-{number}", CHAT, messages=[{"role": "user", "content": text}], max_tokens=24)
        for number, text in enumerate(questions)
    ]
    llmbatch.run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", model=smollm2, dtype="float32")
    expected = [choices_of(one["response"]["body"]) for one in read(tmp_path / "out.jsonl")]
    with serving(model=smollm2, dtype="float32", state_dir=tmp_path / "state", ttft=30.0) as client:
        assert [choices_of(ask(client, asked)) for asked in lines] == expected
        for asked, ((text, _),) in zip(lines, expected, strict=True):
            messages: Any = asked["body"]["messages"]
            chunks = client.chat.completions.create(model=smollm2, messages=messages, max_tokens=24, stream=True)
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
            assert "".join(pieces) == text
            assert len(pieces) > 3


def answered(client: OpenAI, batch: str) -> int:
    """How many lines of a batch are answered."""
    counts = client.batches.retrieve(batch).request_counts
    assert counts is not None
    return counts.completed


@pytest.mark.slow
def test_a_batch_survives_kills_and_signals_end_a_server_with_their_status(chatting: str, tmp_path: Path) -> None:
    lines = [line(f"line-{number}", prompt=f"{number} say", max_tokens=60, ignore_eos=True) for number in range(300)]
    batch = ""
    for ends in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        with process(chatting, tmp_path) as (run, client):
            if not batch:
                content = "".join(json.dumps(one) + "\n" for one in lines).encode()
                file = client.files.create(file=("in.jsonl", content), purpose="batch")
                made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
                batch = made.id
            if ends == signal.SIGINT:
                while (found := client.batches.retrieve(batch)).status != "completed":
                    assert found.status in ("validating", "in_progress", "finalizing")
                assert found.output_file_id is not None
                answers = [json.loads(text) for text in client.files.content(found.output_file_id).text.splitlines()]
                assert [one["custom_id"] for one in answers] == [one["custom_id"] for one in lines]
            else:
                before = answered(client, batch)
                while answered(client, batch) <= before:
                    assert client.batches.retrieve(batch).status in ("validating", "in_progress")
            run.send_signal(ends)
            assert run.wait(timeout=120) == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[ends]

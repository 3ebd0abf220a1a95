"""The operator on tables of every kind."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from transformers import AutoConfig

from llmbatch import DataError, JobError, LLMOperator, ParameterError
from llmbatch.engine.cpu.platform import HOST
from llmbatch.inference.answers.schema import AnswerSchema
from llmbatch.inference.options import Options
from llmbatch.inference.worker import Worker
from llmbatch.operators import workers
from llmbatch.operators.workers import worker_of
from tests.support.models import CHAT_TEMPLATE, tiny_model_folder


@pytest.fixture(scope="module")
def operator(model: str) -> Any:
    return LLMOperator(model=model, prompt="text", max_tokens=4, kv_memory=2**24)


TABLE = pa.table({"id": [3, 1, 2], "text": ["abc", "abd", "x"]})


def test_a_table_keeps_its_rows_and_columns_and_gains_the_answers(operator: Any) -> None:
    answered = operator(TABLE)
    assert answered.column_names == ["id", "text", *AnswerSchema().columns.names]
    assert answered.select(["id", "text"]).equals(TABLE)
    assert answered.schema.field("num_cached_tokens").type == pa.int32()
    assert answered["error"].null_count == 3
    assert set(answered["finish_reason"].to_pylist()) <= {"stop", "length"}


def test_a_second_table_is_answered_like_the_first(operator: Any) -> None:
    assert operator(TABLE).equals(operator(TABLE))


def test_equal_rows_of_two_calls_draw_for_themselves_unless_there_is_a_seed(model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "text", "max_tokens": 20, "kv_memory": 2**24, "ignore_eos": True}
    drawn: Any = LLMOperator(**asked, temperature=1.0)
    table = pa.table({"text": ["Say something."] * 3})
    texts = [answer for _ in range(2) for answer in drawn(table)["generated_text"].to_pylist()]
    texts += [answer for _ in range(2) for answer in drawn.stream(table).read_all()["generated_text"].to_pylist()]
    assert len(set(texts)) == len(texts)
    seeded: Any = LLMOperator(**asked, temperature=1.0, seed=1)
    assert seeded(table)["generated_text"].equals(seeded(table)["generated_text"])


def test_a_thread_gives_back_the_memory_that_another_freed(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(workers, "give_back_freed_memory", lambda: given.append(threading.get_native_id()))
    operator(TABLE)
    del given[:]
    operator(TABLE)
    assert given == []
    other = threading.Thread(target=operator, args=(TABLE,))
    other.start()
    other.join()
    assert given == [other.native_id]


def test_what_the_user_should_know_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model_folder(tmp_path, "llama", chat_template=CHAT_TEMPLATE)
    answer: Any = LLMOperator(model=folder, prompt="text", max_tokens=1, kv_memory=2**24, dtype="float32")
    for _ in range(2):
        answer(TABLE)
    raw = f"prompts are run raw although {folder} has a chat template: use chat=True (--chat) to apply it"
    assert caplog.messages == [raw]


def test_an_empty_table_gets_empty_columns(operator: Any) -> None:
    assert operator(TABLE.slice(0, 0)).column_names == ["id", "text", *AnswerSchema().columns.names]


def test_record_batches_stay_record_batches(operator: Any) -> None:
    batch = TABLE.to_batches()[0]
    assert isinstance(operator(batch), pa.RecordBatch)


def test_pandas_stays_pandas(operator: Any) -> None:
    pandas = pytest.importorskip("pandas")
    answered = operator(TABLE.to_pandas())
    assert isinstance(answered, pandas.DataFrame)
    assert answered["generated_text"].tolist() == operator(TABLE)["generated_text"].to_pylist()


def test_polars_stays_polars(operator: Any) -> None:
    polars = pytest.importorskip("polars")
    answered = operator(polars.from_arrow(TABLE))
    assert isinstance(answered, polars.DataFrame)
    assert answered["generated_text"].to_list() == operator(TABLE)["generated_text"].to_pylist()


def test_a_dict_of_arrays_stays_one(operator: Any) -> None:
    answered = operator({name: TABLE[name].to_numpy() for name in TABLE.column_names})
    assert answered["generated_text"].tolist() == operator(TABLE)["generated_text"].to_pylist()


def test_an_operator_is_sent_to_other_processes_with_its_options(operator: Any) -> None:
    sent = pickle.loads(pickle.dumps(operator))
    assert repr(sent) == repr(operator)
    assert sent(TABLE).equals(operator(TABLE))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_was_forked_from_one_that_runs_models_is_told_so(operator: Any) -> None:
    operator(TABLE)
    there, here = multiprocessing.Pipe()
    forked = multiprocessing.get_context("fork").Process(target=_answer, args=(operator, there))
    forked.start()
    there.close()
    assert here.poll(60)
    assert here.recv() == (
        "a model must run in a process of its own, got one that was forked from a process which runs models: "
        "take multiprocessing.get_context('spawn')"
    )
    forked.join()


def _answer(operator: Any, there: Any) -> None:
    try:
        there.send(operator(TABLE).to_pylist())
    except JobError as error:
        there.send(str(error))


def test_an_unknown_option_is_refused_at_once() -> None:
    known = r"^an option must be one of api_key_file, attention, .*, got 'promt': did you mean prompt\?$"
    with pytest.raises(ParameterError, match=known):
        LLMOperator(model="m", promt="text")  # type: ignore[call-arg]


def test_a_column_of_an_output_name_is_refused(operator: Any) -> None:
    with pytest.raises(DataError, match=r"^the input has a column 'error', and llmbatch writes one of that name"):
        operator(TABLE.append_column("error", pa.array(["", "", ""])))


def test_as_many_rows_run_at_once_as_the_device_takes_or_as_are_asked_for(model: str) -> None:
    options = Options.build(model=model, prompt="text", device="cpu")
    assert Worker.open(options).scheduling.max_running == HOST.max_running
    assert Worker.open(replace(options, max_running=7)).scheduling.max_running == 7
    assert Worker.open(replace(options, engine="simulated", device="cuda")).scheduling.max_running == HOST.max_running


def test_options_of_devices_that_a_simulated_engine_does_not_have_are_named(model: str) -> None:
    asked = Options.build(model=model, prompt="text", engine="simulated", device="cuda", load_format="dummy")
    assert Worker.open(asked).notes[-2:] == (
        "device changes nothing for engine='simulated', which has no device",
        "load_format changes nothing for engine='simulated', which has no device",
    )


def test_an_operator_evaluates_to_a_class_of_its_own(model: str) -> None:
    one, other = (cast(Any, LLMOperator(model=model, prompt="text", max_tokens=n)) for n in (1, 2))
    assert isinstance(one, type)
    assert one.__qualname__ != other.__qualname__
    assert not [name for name in vars(one) if name not in {"options", "__module__", "__doc__"}]


def test_an_interrupted_call_does_not_spoil_the_next(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = operator(TABLE)
    worker: Any = worker_of(operator.options).worker
    engine = worker.load().engine()
    execute = engine.execute

    def interrupted(step: Any) -> Any:
        execute(step)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        operator(TABLE)
    monkeypatch.undo()
    assert operator(TABLE).equals(expected)


def test_prompts_of_token_ids_are_answered_as_their_texts(model: str, operator: Any) -> None:
    texts = TABLE["text"].to_pylist()
    by_ids: Any = LLMOperator(model=model, prompt="ids", max_tokens=4, kv_memory=2**24)
    tokens = Worker.open(by_ids.options).tokenizer.encode(texts, special_tokens=True).to_arrow()
    answered = by_ids(pa.table({"ids": tokens}))
    assert answered["generated_text"].equals(operator(TABLE)["generated_text"])
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    beyond = by_ids(pa.table({"ids": [[vocabulary - 1], [vocabulary]]}))
    assert beyond["error"].to_pylist() == [
        None,
        f"prompt[0] must be a token id from 0 to {vocabulary - 1}, got {vocabulary}",
    ]

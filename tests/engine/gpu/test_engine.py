"""The engine for a device gives the answers of `generate`: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig

pytest.importorskip("triton")

from llmbatch import LLMOperator
from llmbatch.engine.calibration.memory_profile import run_largest
from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.sampler import Draw, choose
from llmbatch.engine.model.config import bytes_per_token
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.sampling.sampler import sample
from llmbatch.errors import ModelError, ParameterError
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.scheduler.admission_order import Blend
from tests.support.golden import Golden, generate
from tests.support.models import EOS, FAMILIES, PAD, tiny_model, tiny_model_folder

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
PLATFORM = Platform(DEVICE, GpuOps(DEVICE), PAGE_SIZE, max_running=512)
MAX_TOKENS = 6
LAYERS = 2  # of tiny models: the interpreter takes a second for each in every step
OFTEN = ("llama", "gpt_oss")  # those that differ most; others take minutes in the interpreter


def prompts() -> list[list[int]]:
    """Two groups with prefixes of 9 and 5 tokens, and one of a single token."""
    rng = np.random.default_rng(5)
    prefixes = [rng.integers(0, 256, length).tolist() for length in (9, 5)]
    return [*(prefixes[i % 2] + rng.integers(0, 256, 1 + i).tolist() for i in range(5)), [7]]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in FAMILIES]
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    """A family's tiny model, loaded, and what `generate` says."""
    folder = tiny_model_folder(tmp_path_factory.mktemp(request.param), request.param, layers=LAYERS)
    rows = prompts()
    expected = generate(tiny_model(request.param, layers=LAYERS), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
    return load_model(folder, dtype="float32", platform=PLATFORM), expected


def test_answers_are_those_of_generate_though_rows_are_preempted(family: tuple[LoadedModel, Any]) -> None:
    loaded, expected = family
    golden = Golden(prompts(), MAX_TOKENS, page_size=4, spare_pages=3)
    engine = GpuEngine(loaded, TritonAttention(DEVICE), num_pages=golden.num_pages, page_size=4)
    assert golden.run(engine, Blend(0.1, 0.2), 16) == expected
    assert golden.preemptions > 0
    assert golden.cached > 0


def test_an_operator_runs_on_it(shallow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are those of the processor, drawn ones and one with a stop string among them."""
    text = "abcdef" * 4
    params = [
        json.dumps(one)
        for one in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 5, "seed": 4}, {"stop": "a"})
    ]
    rows = pa.table({"text": [text, text + "x", "y", text + "z"], "params": params})
    given: dict[str, Any] = {"model": shallow, "prompt": "text", "max_tokens": 5, "dtype": "float32"}
    given |= {"kv_memory": 2**20, "page_size": 8}
    expected = LLMOperator(**given, sampling_params="params")(rows)
    monkeypatch.setattr("llmbatch.engine.devices.find_platform", lambda device, ranks=1, kv="device": PLATFORM)
    answered = LLMOperator(**given, sampling_params="params", device="cuda")(rows)
    assert answered.equals(expected)
    assert answered["error"].null_count == rows.num_rows


ASKED: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"logit_bias": {"70": 4.0, "71": -100}, "min_tokens": 3},
    {"temperature": 1.0, "min_p": 0.2, "seed": 3},
    {"logprobs": 2, "temperature": 0.7, "seed": 5},
    {"prompt_logprobs": 1},
    {"structured_outputs": {"choice": ["yellow", "yes", "no"]}, "max_tokens": 9},
    {"structured_outputs": {"regex": "[0-9]{2}-[0-9]{2}"}, "max_tokens": 9, "logprobs": 0},
    {"temperature": 1.0, "n": 2, "seed": 7},
    {"stop": "a"},
]


def test_rows_may_ask_for_all_that_they_may_on_a_processor(shallow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that ask for nothing run beside them, and rows end in different steps."""
    pytest.importorskip("llguidance")
    rows = pa.table(
        {
            "text": [f"{'abc' * (i % 3)} row {i}" for i in range(len(ASKED))],
            "params": [json.dumps(one) for one in ASKED],
        }
    )
    given: dict[str, Any] = {"model": shallow, "prompt": "text", "max_tokens": 6, "dtype": "float32"}
    given |= {"kv_memory": 2**20, "page_size": 8, "sampling_params": "params"}
    expected = LLMOperator(**given)(rows)
    monkeypatch.setattr("llmbatch.engine.devices.find_platform", lambda device, ranks=1, kv="device": PLATFORM)
    answered = LLMOperator(**given, device="cuda")(rows)
    assert expected["error"].null_count == rows.num_rows
    for name in expected.column_names:
        assert_told(answered[name].to_pylist(), expected[name].to_pylist())


def assert_told(found: Any, expected: Any) -> None:
    """Numbers may differ by what the order of sums makes of them, and nothing else may."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_told(*pair)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_told(found[name], value)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    else:
        assert found == expected


def test_continuations_are_scored_on_it(shallow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.table({"text": ["abc" * 5, "b"], "ends": [["yes", "no"], ["maybe", "never"]]})
    given: dict[str, Any] = {"model": shallow, "prompt": "text", "dtype": "float32", "continuation": "ends"}
    given |= {"kv_memory": 2**20, "page_size": 8}
    expected = LLMOperator(**given)(rows)
    monkeypatch.setattr("llmbatch.engine.devices.find_platform", lambda device, ranks=1, kv="device": PLATFORM)
    assert_told(LLMOperator(**given, device="cuda")(rows).to_pylist(), expected.to_pylist())


def test_heads_that_are_too_wide_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=272,
        vocab_size=32,
        max_position_embeddings=64,
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path), dtype="float32", load_format="dummy", platform=PLATFORM)
    assert str(caught.value) == (
        f"model '{tmp_path}' uses heads of 272 elements, which is not supported: on a GPU they have 256 at most; "
        "take --device cpu"
    )


def test_pages_of_a_device_are_of_a_power_of_two(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmbatch.engine.devices.find_platform", lambda device, ranks=1, kv="device": PLATFORM)
    with pytest.raises(ParameterError) as caught:
        LLMOperator(model=model, prompt="text", page_size=24)(pa.table({"text": ["a"]}))
    assert str(caught.value) == "page_size must be a power of two on a GPU, got 24"


def test_the_largest_step_is_run_to_see_what_it_takes(shallow: str) -> None:
    loaded = load_model(shallow, dtype="float32", platform=PLATFORM)
    taken = run_largest(loaded, TritonAttention(DEVICE), tokens=10, rows=3, page_size=16)
    assert taken == 3 * 16 * bytes_per_token(loaded.attention.values(), loaded.kv_type, torch.device("cuda"))


Sampling = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32], NDArray[np.uint64], NDArray[np.int32]]


def sixty_rows() -> tuple[NDArray[np.float32], Sampling]:
    """Logits, one of which is NaN, and how rows are drawn: the arguments of `Draw.of`."""
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((60, 300))).astype(np.float32)
    logits[7, 5] = np.nan
    temperature = rng.choice([0.0, 0.5, 1.0, 2.0], 60).astype(np.float32)
    top_k = rng.choice([0, 1, 4, 50], 60).astype(np.int32)
    top_p = rng.choice([1.0, 0.3, 0.9], 60).astype(np.float32)
    seeds, positions = rng.integers(0, 2**63, 60).astype(np.uint64), rng.integers(0, 99, 60).astype(np.int32)
    return logits, (temperature, top_k, top_p, seeds, positions)


def test_draws_are_those_of_the_processor() -> None:
    logits, given = sixty_rows()
    expected, finite = np.empty(60, np.int32), np.empty(60, np.bool_)
    sample(logits, *given, expected, finite)
    tokens, fine = choose(torch.from_numpy(logits).to(DEVICE), Draw.of(*given))
    assert fine.tolist() == finite.tolist()
    assert tokens[fine].tolist() == expected[finite].tolist()


def test_equal_logits_are_drawn_as_on_the_processor() -> None:
    _, given = sixty_rows()
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 4, (60, 300)).astype(np.float32)
    expected, finite = np.empty(60, np.int32), np.empty(60, np.bool_)
    sample(logits, *given, expected, finite)
    tokens, _ = choose(torch.from_numpy(logits).to(DEVICE, torch.bfloat16), Draw.of(*given))
    assert tokens.tolist() == expected.tolist()


def test_no_token_without_weight_is_drawn_by_the_largest_random_number() -> None:
    """Sums over all weights differ in their last bits from sums over those that are kept."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((24, 3000)).astype(np.float32)
    logits[:, 300:] -= 1000.0
    given = np.tile(np.array([[1.0, 1000.0, 1.0, 1.0 - 2.0**-24]], np.float32), (24, 1))
    draw = Draw(np.arange(24, dtype=np.int32), given)
    tokens, _ = choose(torch.from_numpy(logits).to(DEVICE), draw)
    assert int(tokens.max()) < 300


def test_rows_are_drawn_from_more_logits_than_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, given = sixty_rows()
    few: Any = [column[:12] for column in given]  # an interpreter takes its time
    there, draw = torch.from_numpy(logits[:12]).to(DEVICE), Draw.of(*few)
    at_once, _ = choose(there, draw)
    monkeypatch.setattr("llmbatch.kernels.triton.draw._BLOCK", 128)
    in_blocks, _ = choose(there, draw)
    assert in_blocks.tolist() == at_once.tolist()

"""Costs agree with the paper's worked numbers and with published model sizes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.errors import ModelError, ParameterError
from llmbatch.perf_model.cost import OVERLAPPED, SEQUENTIAL, CostModel, Overlap
from llmbatch.perf_model.hardware import GPUS, Hardware, find_hardware, measure_cpu
from llmbatch.perf_model.shape import ModelShape, find_shape
from llmbatch.planning.prefix_tree import PrefixTree
from tests.support.paths import TRACES

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def peak(name: str) -> Hardware:
    return replace(find_hardware(name), compute_efficiency=1.0, bandwidth_efficiency=1.0)


AT_PEAK = CostModel(find_shape("llama-3-8b"), peak("a100-80gb"))


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**(LLAMA_3_8B | fields))


def read_trace(name: str) -> pa.Table:
    path = TRACES / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"the trace {path} is not there; set LLMBATCH_TRACES to the folder of the traces")
    return pq.read_table(path)


# --- requests and steps


def test_request_costs_follow_the_formulas() -> None:
    p, d = 1000.0, 100.0
    compute = (2 * (p + d - 1) * 8.03e9 + 2 * p * (p + 1) * 4096 * 32) / 312e12
    memory = (p * d + d * (d - 1) / 2) * 131072 / 2.039e12
    assert AT_PEAK.request_compute([p], [d])[0] == pytest.approx(compute)
    assert AT_PEAK.request_memory([p], [d], [d**2])[0] == pytest.approx(memory)


def test_memory_grows_with_the_second_moment() -> None:
    lengths = np.array([10.0, 990.0])
    each = AT_PEAK.request_memory([50.0, 50.0], lengths, lengths**2).mean()
    assert AT_PEAK.request_memory([50.0], [lengths.mean()], [(lengths**2).mean()])[0] == pytest.approx(each)


@pytest.mark.parametrize(
    ("trace", "sharing", "linear", "causal"),
    [("mmlu_5shot", 0.8644, 54.4, 55.35), ("azure2023_code", 0.0, 28.0, 29.75)],
)
def test_trace_densities_are_those_of_table_4(trace: str, sharing: float, linear: float, causal: float) -> None:
    # (1 - s) T_comp / T_mem as in the paper's 5.1, whose figures leave the attention of prompts out.
    table = read_trace(trace)
    prompt, output = table["prompt_tokens"].to_numpy(), table["output_tokens"].to_numpy()
    memory = AT_PEAK.request_memory(prompt, output, output.astype(np.float64) ** 2).sum()
    without_attention = replace(AT_PEAK, shape=replace(AT_PEAK.shape, attention_width=0.0))
    for cost, density in ((without_attention, linear), (AT_PEAK, causal)):
        compute = (1 - sharing) * cost.request_compute(prompt, output).sum()
        assert compute / memory == pytest.approx(density, rel=0.002)


def test_sharing_of_a_trace_is_seen_through_its_block_ids() -> None:
    table = read_trace("mmlu_5shot")
    ids = table["hash_ids"].combine_chunks()
    prompt = table["prompt_tokens"].to_numpy().astype(np.int32)
    tree = PrefixTree.from_blocks(
        ids.values.to_numpy().astype(np.int32), ids.offsets.to_numpy().astype(np.int64), prompt, 16
    )
    assert tree.sharing == pytest.approx(0.854, abs=5e-4)  # .864 by tokens: the rest parts within a block


@pytest.mark.parametrize(("batch", "milliseconds"), [(512, 1.239), (768, 1.859), (1024, 2.478)])
def test_decode_attention_times_are_those_of_table_1(batch: int, milliseconds: float) -> None:
    cost = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))
    one_layer = cost.step(batch, 0, batch * 1024, batch).memory / 32
    assert one_layer * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_under_the_law_paper_reading_weights_is_the_floor_of_compute() -> None:
    step = AT_PEAK.step(1, 0, 1000, 1)
    assert step.compute == pytest.approx(16.06e9 / 2.039e12)
    assert step.memory == pytest.approx(1000 * 131072 / 2.039e12)
    full = AT_PEAK.step(4096, 4096 * 4097 // 2, 0, 0)
    assert full.compute == pytest.approx((2 * 8.03e9 * 4096 + 4 * 4096 * 32 * 4096 * 4097 / 2) / 312e12)


def test_under_the_law_bytes_weights_and_kv_share_one_memory() -> None:
    cost = replace(AT_PEAK, law="bytes")
    step = cost.step(1, 0, 1000, 1)
    assert step.compute == pytest.approx(2 * 8.03e9 / 312e12)
    assert step.memory == pytest.approx((16.06e9 + 1000 * 131072) / 2.039e12)
    assert cost.optimal_seconds(0.0, 10.0, 16.06e9) == pytest.approx(20.0)
    assert AT_PEAK.optimal_seconds(0.0, 10.0, 16.06e9) == pytest.approx(10.0)


def test_sliding_layers_look_back_a_window() -> None:
    shape = replace(find_shape("llama-3-8b"), windows=(100,) * 16 + (0,) * 16)
    cost = replace(AT_PEAK, shape=shape)
    pairs = 16 * (100 * 101 / 2 + 900 * 100) + 16 * 1000 * 1001 / 2
    assert cost.request_compute([1000.0], [1.0])[0] == pytest.approx((2 * 1000 * 8.03e9 + 4 * pairs * 4096) / 312e12)
    read = 32 * 1000 + 16 * 100 * 49 + 16 * (1000 * 49 + 49 * 50 / 2)  # a prompt in one piece reads all of itself
    assert cost.request_memory([1000.0], [50.0], [2500.0])[0] == pytest.approx(read * 4096 / 2.039e12)


SLOW_ATTENTION = replace(
    AT_PEAK, hardware=replace(AT_PEAK.hardware, compute_efficiency=0.8, attention_efficiency=0.4, step_seconds=0.002)
)


def test_attention_over_prompts_has_a_rate_of_its_own() -> None:
    products = 2 * (1000 + 99) * 8.03e9 / (0.8 * 312e12)
    attention = 2 * 1000 * 1001 * 4096 * 32 / (0.4 * 312e12)
    assert SLOW_ATTENTION.request_compute([1000.0], [100.0])[0] == pytest.approx(products + attention)
    step = SLOW_ATTENTION.step(4096, 1e6, 0, 0)
    assert step.compute == pytest.approx(2 * 8.03e9 * 4096 / (0.8 * 312e12) + 4 * 4096 * 32 * 1e6 / (0.4 * 312e12))


def test_attention_without_a_rate_of_its_own_is_as_fast_as_products() -> None:
    same = replace(AT_PEAK, hardware=replace(AT_PEAK.hardware, attention_efficiency=1.0))
    assert same.step(4096, 1e6, 500, 3) == AT_PEAK.step(4096, 1e6, 500, 3)
    assert same.request_compute([1000.0], [9.0])[0] == AT_PEAK.request_compute([1000.0], [9.0])[0]


def test_a_step_takes_the_devices_fixed_seconds_beside_its_work_and_the_optimum_does_not() -> None:
    compute, memory = SLOW_ATTENTION.step(700, 1e5, 400_000, 3)
    assert SLOW_ATTENTION.step_time(700, 1e5, 400_000, 3) == pytest.approx((compute**4 + memory**4) ** 0.25 + 0.002)
    assert SLOW_ATTENTION.optimal_seconds(3.0, 0.0, 1.0) == pytest.approx(3.0)


# --- overlap


def test_an_exponent_of_one_is_one_after_the_other() -> None:
    assert SEQUENTIAL(3.0, 4.0) == pytest.approx(7.0)


def test_an_infinite_exponent_hides_the_shorter() -> None:
    assert Overlap(float("inf"))(3.0, 4.0) == pytest.approx(4.0)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_overlap_is_the_power_law(c: float, m: float) -> None:
    assert OVERLAPPED(c, m) == pytest.approx((c**4 + m**4) ** 0.25, rel=1e-9, abs=1e-60)


def test_an_exponent_below_one_is_refused() -> None:
    with pytest.raises(ParameterError) as error:
        Overlap(0.5)
    assert str(error.value) == "overlap_exponent must be at least 1, got 0.5"


# --- shapes


def test_llama_3_8b_has_its_published_size() -> None:
    shape = ModelShape.from_config(config(), 2)
    assert shape.params_total == 8_030_261_248
    assert shape.params + shape.head_params == pytest.approx(7.504e9, rel=1e-3)
    assert shape.kv_bytes_per_token == 131072
    assert (shape.layers, shape.attention_width, shape.vocabulary) == (32, 4096, 128256)


def test_tied_embeddings_are_stored_once_and_read_as_head() -> None:
    shape = ModelShape.from_config(config(tie_word_embeddings=True), 2)
    assert shape.params_total == 8_030_261_248 - 128256 * 4096
    assert shape.head_params == 128256 * 4096


def test_layers_of_their_own_type_have_the_embeddings_in_the_models() -> None:
    shape, int8 = ModelShape.from_config(config(), 2), ModelShape.from_config(config(), 2, 1)
    assert shape.weight_bytes - int8.weight_bytes == shape.params
    assert int8.kv_bytes_per_token == shape.kv_bytes_per_token


def test_experts_count_once_each_in_memory_and_as_chosen_in_compute() -> None:
    mixtral = config(
        model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, vocab_size=32000, sliding_window=None
    )
    shape = ModelShape.from_config(mixtral, 2)
    assert shape.params_total == pytest.approx(46.7e9, rel=2e-3)
    assert shape.params + 2 * shape.head_params == pytest.approx(12.9e9, rel=3e-3)


def test_a_multimodal_config_is_read_through_its_text_config() -> None:
    assert ModelShape.from_config(SimpleNamespace(text_config=config()), 2) == ModelShape.from_config(config(), 2)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (0,) * 32),
        ({"sliding_window": 4096}, (4096,) * 32),
        ({"sliding_window": 4096, "use_sliding_window": False}, (0,) * 32),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16},
            (512, 0) * 16,
        ),
    ],
)
def test_windows_are_read_by_layer(fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert ModelShape.from_config(config(**fields), 2).windows == windows


def test_latent_attention_keeps_one_latent_vector_a_token() -> None:
    latent = config(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=None)
    shape = ModelShape.from_config(latent, 2)
    assert shape.kv_bytes_per_token == 576 * 32 * 2
    assert shape.attention_width == 32 * (64 + 128 + 128) / 2


def test_a_config_without_a_needed_field_is_refused() -> None:
    with pytest.raises(ModelError) as error:
        ModelShape.from_config(SimpleNamespace(model_type="mamba"), 2)
    assert str(error.value) == "a model's config must give hidden_size, but that of mamba does not"


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"^model_shape must be one of llama-3-8b, .*, got 'llama-9'$"):
        find_shape("llama-9")


# --- hardware


def test_hardware_is_found_in_any_case() -> None:
    assert find_hardware("A100-80GB") is GPUS["a100-80gb"]
    assert GPUS["a100-80gb"].flops == pytest.approx(234e12)
    assert GPUS["a100-80gb"].bytes_per_second == pytest.approx(0.85 * 2.039e12)


def test_unknown_hardware_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"^hardware must be one of a10, .*, got 'abacus'$"):
        find_hardware("abacus")


def test_a_device_without_bandwidth_is_refused() -> None:
    with pytest.raises(ParameterError) as error:
        Hardware(name="toy", compute=1.0, bandwidth=0.0, memory=1.0)
    assert str(error.value) == "bandwidth of a device must be positive, got 0.0 for toy"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_efficiency": 1.5}, "attention_efficiency must lie in (0, 1], got 1.5 for toy"),
        ({"attention_efficiency": 0.0}, "attention_efficiency must lie in (0, 1], got 0.0 for toy"),
        ({"weight_efficiency": 2.0}, "weight_efficiency must lie in (0, 1], got 2.0 for toy"),
        ({"weight_overlap": 0.5}, "weight_overlap must be at least 1, got 0.5 for toy"),
        ({"step_seconds": -1e-3}, "step_seconds of a device must be at least 0, got -0.001 for toy"),
        ({"token_seconds": -1e-6}, "token_seconds of a device must be at least 0, got -1e-06 for toy"),
        ({"link": 0.0}, "link of a device must be positive, got 0.0 for toy"),
    ],
)
def test_a_rate_or_a_time_that_cannot_be_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        replace(Hardware(name="toy", compute=1.0, bandwidth=1.0, memory=1.0), **fields)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_this_cpu_is_measured_once_a_process() -> None:
    measured = measure_cpu()
    assert 1e8 < measured.flops < 1e14
    assert 1e8 < measured.bytes_per_second < 1e13
    assert measure_cpu() is measured


def test_prompt_tokens_found_in_pages_are_neither_computed_nor_attended_from() -> None:
    pairs = sum(range(601, 1001))
    compute = 2 * (400 + 9) * 8.03e9 + 4 * 4096 * 32 * pairs
    assert AT_PEAK.request_compute([1000.0], [10.0], [600.0])[0] == pytest.approx(compute / 312e12)
    saved = AT_PEAK.request_compute([1000.0], [10.0])[0] - compute / 312e12
    assert AT_PEAK.saved_seconds([600.0])[0] == pytest.approx(saved)
    read = AT_PEAK.request_memory([1000.0], [1.0], [1.0])[0]
    assert AT_PEAK.request_memory([1000.0], [1.0], [1.0], 0.0, [600.0])[0] == read


def test_reads_of_layers_with_a_window_are_exact_for_a_known_length_and_a_bound_else() -> None:
    cost = replace(AT_PEAK, shape=replace(AT_PEAK.shape, windows=(100,) * 32))

    def read(lengths: NDArray[np.float64]) -> float:
        return sum(min(80 + k, 100) for d in lengths for k in range(1, int(d))) / len(lengths) + 80

    for lengths in (np.array([50.0]), np.array([10.0, 10.0, 300.0])):
        seconds = cost.request_memory([80.0], [lengths.mean()], [(lengths**2).mean()])[0]
        exact = read(lengths) * 131072 / 2.039e12
        assert seconds == pytest.approx(exact) if len(lengths) == 1 else exact < seconds < 1.1 * exact

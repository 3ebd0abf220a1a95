"""The best split of devices is that of all, however few are simulated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbatch.errors import ParameterError
from llmbatch.perf_model.hardware import GPUS
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Scheduling, Workload
from llmbatch.simulation import search as search_module
from llmbatch.simulation.search import SearchedSplit, search
from llmbatch.simulation.splits import Offer, Split, host_of, splits_of

SCHEDULING = Scheduling(max_running=1024)
DEVICES = {"h100": 4, "l40s": 8}
PRICE = {"h100": 2.5, "l40s": 0.2}  # dollars an hour
KINDS = {  # prompt tokens and the median of answers
    "long prompts": (3000, 10),
    "long answers": (30, 40),
}


def jobs_of(kind: str, seed: int = 0, rows: int = 30) -> tuple[Workload, NDArray[np.int32]]:
    """Rows that share nothing, and the tokens of their answers."""
    prompt, median = KINDS[kind]
    rng = np.random.default_rng(seed)
    lengths = rng.integers(prompt // 2, 2 * prompt, rows)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    tree = PrefixTree.build(rng.integers(0, 50_000, offsets[-1]).astype(np.int32), offsets)
    output = np.clip(median * rng.lognormal(0.0, 1.0, rows), 1, 150).astype(np.int32)
    zeros = np.zeros(rows, np.int32)
    return Workload(tree, zeros + np.int32(150), zeros, zeros), output


def splits(price: dict[str, float] | None = None, model: str = "llama-3-8b") -> list[Split]:
    return splits_of(Offer.all_of(DEVICES, price), find_shape(model))


def named(split: Split) -> tuple[str, int]:
    return split.offer.hardware.name, split.tensor_parallel


@cache
def seconds_of_all(kind: str, seed: int = 0) -> dict[tuple[str, int], float]:
    """The seconds of each split, simulated."""
    workload, output = jobs_of(kind, seed)
    return {
        named(split): search_module._simulated(workload, output, split, SCHEDULING, copies=split.data_parallel)
        for split in splits()
    }


def told(found: SearchedSplit) -> tuple[str, int]:
    return found.device, found.tensor_parallel


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("price", [None, PRICE])
def test_the_two_best_are_those_of_all(kind: str, price: dict[str, float] | None) -> None:
    workload, output = jobs_of(kind)
    every = splits(price)
    seconds = seconds_of_all(kind)
    found = search(workload, output, every, SCHEDULING)
    worth = {named(split): split.dollars(seconds[named(split)]) or seconds[named(split)] for split in every}
    assert [told(one) for one in found[:2]] == sorted(worth, key=worth.__getitem__)[:2]
    assert [one.seconds for one in found[:2]] == [seconds[told(one)] for one in found[:2]]


def test_weights_are_read_as_often_as_steps_are_needed() -> None:
    workload, output = jobs_of("long answers")
    [split] = splits_of(Offer.all_of({"a5000": 1}), find_shape("mixtral-8x7b"))
    narrow = replace(SCHEDULING, max_running=2)
    [found] = search(workload, output, [split], narrow)
    assert found.binding == "weights"
    assert found.seconds_least == pytest.approx((output - 1).sum() / 2 * split.cost.rates.weight_seconds)
    assert found.seconds is not None
    assert found.seconds_least <= found.seconds < 1.2 * found.seconds_least


@pytest.mark.parametrize("kind", KINDS)
def test_no_split_ends_before_its_bound(kind: str) -> None:
    workload, output = jobs_of(kind)
    seconds = seconds_of_all(kind)
    for found in search(workload, output, splits(), SCHEDULING):
        assert found.seconds_least <= seconds[told(found)]


def test_one_row_of_a_mixture_reads_no_expert_but_its_own() -> None:
    workload, output = jobs_of("long answers")
    [row] = np.flatnonzero(output == output.max())[:1]
    one = workload.without([other for other in range(len(workload)) if other != row])
    [split] = splits_of(Offer.all_of({"h200": 1}), find_shape("qwen3-30b-a3b"))
    [found] = search(one, output, [split], SCHEDULING)
    assert found.binding == "longest row"
    assert found.seconds is not None
    assert 0.9 * found.seconds < found.seconds_least <= found.seconds


@pytest.mark.parametrize("running", [2, 1024])
def test_no_split_of_a_mixture_ends_before_its_bound(running: int) -> None:
    workload, output = jobs_of("long answers")
    narrow = replace(SCHEDULING, max_running=running)
    for split in splits_of(Offer.all_of({"h200": 2}), find_shape("qwen3-30b-a3b")):
        [found] = search(workload, output, [split], narrow)
        assert found.seconds is not None
        assert found.seconds_least <= found.seconds


def test_what_cannot_be_best_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, output = jobs_of("long prompts")
    simulated: list[str] = []
    real = search_module._simulated

    def noted(
        workload: Workload, output: NDArray[np.int32], split: Split, scheduling: Scheduling, *, copies: int
    ) -> float:
        simulated.append(split.offer.hardware.name)
        return real(workload, output, split, scheduling, copies=copies)

    monkeypatch.setattr(search_module, "_simulated", noted)
    offers = Offer.all_of({"h100": 8, "rtx-3090": 1})
    found = search(workload, output, splits_of(offers, find_shape("llama-3-8b")), SCHEDULING)
    assert "rtx-3090" not in simulated
    assert [one.seconds is None for one in found] == sorted(one.seconds is None for one in found)
    assert found[-1].in_words == f"1 rtx-3090: at least {found[-1].seconds_least:,.1f} s, bound by compute"


def test_more_copies_than_rows_are_simulated_too() -> None:
    workload, output = jobs_of("long answers")
    few = np.arange(2, dtype=np.int32)
    two = workload.without([row for row in range(len(workload)) if row not in few])
    found = search(two, output, splits(), SCHEDULING)
    assert all(one.seconds is not None for one in found if one.data_parallel > 2)


def longer(times: int) -> tuple[Workload, NDArray[np.int32]]:
    """So many times 30 rows of long answers, no two alike."""
    drawn = [jobs_of("long answers", seed) for seed in range(times)]
    prompts = [np.random.default_rng(seed).integers(0, 50_000, 30 * 40) for seed in range(times)]
    lengths = np.full(30 * times, 40)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    tree = PrefixTree.build(np.concatenate(prompts).astype(np.int32), offsets)
    zeros = np.zeros(30 * times, np.int32)
    return Workload(tree, zeros + np.int32(150), zeros, zeros), np.concatenate([output for _, output in drawn])


def test_a_job_of_which_a_sample_is_read_takes_about_what_all_of_it_would() -> None:
    [split] = splits_of([Offer(GPUS["l40s"], 1)], find_shape("llama-3-8b"))
    scheduling = replace(SCHEDULING, max_running=8)
    workload, output = longer(8)
    [whole] = search(workload, output, [split], scheduling)
    rows = np.arange(len(workload)) % 2 == 0
    sampled = replace(workload, tree=workload.tree.select(rows))
    [found] = search(sampled, output, [split], scheduling, times=2.0)
    assert found.seconds == pytest.approx(whole.seconds, rel=0.1)


def test_copies_share_a_job_of_which_a_sample_is_read() -> None:
    workload, output = jobs_of("long answers")
    two = [split for split in splits() if named(split) == ("h100", 2)]
    [by_two] = search(workload, output, two, SCHEDULING, times=2.0)
    assert two[0].data_parallel == 2
    [alone] = search(workload, output, splits_of([Offer(GPUS["h100"], 2, groups=(2,))], find_shape("llama-3-8b")),
                     SCHEDULING)  # fmt: skip  # its last line
    assert by_two.seconds == pytest.approx(alone.seconds)


def test_no_estimate_is_below_its_bound() -> None:
    workload, output = jobs_of("long prompts")
    for found in search(workload, output, splits(), SCHEDULING, times=50.0):
        assert found.seconds is None or found.seconds >= found.seconds_least


def test_a_copy_has_room_for_the_longest_row() -> None:
    workload, output = jobs_of("long prompts", rows=4)
    every = splits(model="llama-3-70b")
    assert {named(split) for split in every if split.weights == "resident"} == {
        ("h100", 2),
        ("h100", 4),
        ("l40s", 4),
        ("l40s", 8),
    }
    long = replace(workload, max_tokens=np.full_like(workload.max_tokens, 400_000))
    output = np.full_like(output, 300_000)
    assert {told(one) for one in search(long, output, every, SCHEDULING, times=2.0)} == {("h100", 4), ("l40s", 8)}
    with pytest.raises(ParameterError) as raised:
        search(long, output, [split for split in every if named(split) == ("l40s", 4)], SCHEDULING)
    assert str(raised.value) == (
        "devices must hold the longest row, and none of those offered do: lower max_tokens (--max-tokens), or offer "
        "more or larger devices"
    )


def test_a_split_is_said_in_a_line() -> None:
    one = SearchedSplit(
        device="h100",
        tensor_parallel=2,
        data_parallel=4,
        seconds=1234.5,
        seconds_least=1000.0,
        weights="resident",
        kv="device",
        dollars=6.858,
        binding="memory",
    )
    assert one.in_words == "4 x 2 h100: 1,234.5 s, 6.86 dollars, bound by memory"
    assert replace(one, weights="host", dollars=None).in_words == (
        "4 x 2 h100 with weights in the host's memory: 1,234.5 s, bound by memory"
    )
    assert replace(one, weights="host", kv="host", dollars=None).in_words == (
        "4 x 2 h100 with weights, keys and values in the host's memory: 1,234.5 s, bound by memory"
    )
    assert replace(one, dollars=0.004).in_words == "4 x 2 h100: 1,234.5 s, less than 0.01 dollars, bound by memory"


@pytest.mark.parametrize(
    ("devices", "price", "said"),
    [
        ({"h100": 0}, None, "devices must be at least 1 of each kind, got 0 of h100"),
        (
            {"h100": 2000},
            None,
            "devices must be at most 1,024 of each kind, got 2,000 of h100: search for a part of the rows on a part of "
            "the devices",
        ),
        ({"h100": 1}, {"h100": 0.0}, "price of a device must be a positive number, got 0 for h100"),
        (
            {"h100": 1},
            {"l40s": 1.0},
            "price must be of devices that are offered, got 'l40s': name it in devices (--devices) too",
        ),
        (
            {"h100": 1, "L40S": 1},
            {"H100": 2.0},
            "price must be given for every kind of devices or for none, got none for 'L40S': name it in price "
            "(--price) too, since what costs least is the best",
        ),
        ("h100:8", None, "devices must be a mapping from names of devices, got 'h100:8'"),
        (["h100"], None, "devices must be a mapping from names of devices, got ['h100']"),
        ({"h100": 2.5}, None, "devices['h100'] must be a whole number, got 2.5"),
        ({8: 1}, None, "devices must be text, got 8"),
        ({"h100": 1}, {7: 2.0}, "price must be text, got 7"),
        ({"h100": 1}, "h100=1", "price must be a mapping from names of devices, got 'h100=1'"),
        ({"h100": 1}, {"h100": "2"}, "price['h100'] must be a finite number, got '2'"),
        ({"h999": 1}, None, f"devices must be one of {', '.join(GPUS)}, got 'h999'"),
    ],
)
def test_offers_are_checked(devices: Any, price: Any, said: str) -> None:
    with pytest.raises(ParameterError) as raised:
        Offer.all_of(devices, price)
    assert str(raised.value) == said


def test_weights_that_a_device_has_no_room_for_come_from_its_host() -> None:
    [split] = splits_of(Offer.all_of({"h100": 1}), find_shape("llama-3-70b"))
    assert (split.weights, split.tensor_parallel) == ("host", 1)
    weights = find_shape("llama-3-70b").weight_bytes
    assert split.cost.rates.weight_seconds == pytest.approx(weights / (64e9 * 0.85), rel=1e-6)
    assert 70e9 < split.pool.tokens * split.cost.shape.kv_bytes_per_token < 73e9
    workload, output = jobs_of("long prompts")
    [found] = search(workload, output, [split], SCHEDULING)
    assert found.in_words.startswith("1 h100 with weights in the host's memory: ")
    assert found.seconds is not None
    assert found.seconds_least <= found.seconds


def test_keys_and_values_may_lie_in_the_memory_of_a_host_that_is_described() -> None:
    offers = Offer.all_of({"a5000": 2})
    shape = find_shape("mixtral-8x7b")
    on_device, by_host = splits_of(offers, shape, host_of({"memory": 4e11, "bandwidth": 2e11, "compute": 2e12}))
    assert [(split.weights, split.kv) for split in (on_device, by_host)] == [("host", "device"), ("host", "host")]
    kv = shape.kv_bytes_per_token
    assert by_host.pool.tokens * kv == pytest.approx(0.5 * (2e11 - shape.weight_bytes), rel=1e-3)  # each copy its half
    assert by_host.cost.rates.seconds_per_kv_token == pytest.approx(kv / (1e11 * 0.85))
    assert by_host.cost.rates.weight_seconds == pytest.approx(on_device.cost.rates.weight_seconds)
    assert by_host.scheduling(SCHEDULING).max_running == 4096
    assert on_device.scheduling(SCHEDULING) == SCHEDULING


@pytest.mark.parametrize("seed", range(2))
def test_thousands_of_rows_are_best_where_the_host_attends(seed: int) -> None:
    rng, rows = np.random.default_rng(seed), 2000
    offsets = np.arange(0, 64 * (rows + 1), 64, dtype=np.int64)
    tree = PrefixTree.build(rng.integers(0, 50_000, offsets[-1]).astype(np.int32), offsets)
    zeros = np.zeros(rows, np.int32)
    output = rng.integers(60, 120, rows).astype(np.int32)
    workload = Workload(tree, zeros + np.int32(150), zeros, zeros)
    host = host_of({"memory": 2e11})
    found = search(
        workload, output, splits_of(Offer.all_of({"a5000": 1}), find_shape("mixtral-8x7b"), host), SCHEDULING
    )
    assert [one.kv for one in found] == ["host", "device"]
    seconds = [one.seconds for one in found]
    assert seconds[0] is not None
    assert seconds[1] is not None
    assert found[0].seconds_least <= seconds[0] < seconds[1]


def test_a_host_without_room_for_the_weights_is_of_no_use() -> None:
    with pytest.raises(ParameterError) as raised:
        splits_of(Offer.all_of({"a5000": 1}), find_shape("mixtral-8x7b"), host_of({"memory": 5e10}))
    assert str(raised.value) == (
        "devices must hold the model, and none of those offered do: weights of 93.4 GB leave no room for KV in 24 GB "
        "of a5000; offer more or larger ones, or a host with more memory"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"memory": 1e12, "cores": 64.0},
            "device_host must tell its memory, and bandwidth and compute if they are known, got cores: say as in "
            "{'memory': 1e12, 'bandwidth': 2e11} (--device-host memory=1TB,bandwidth=200GB)",
        ),
        ({"memory": 0.0}, "memory of device_host must be positive, got 0"),
        ({"memory": 1e12, "bandwidth": float("nan")}, "device_host['bandwidth'] must be a finite number, got nan"),
    ],
)
def test_a_host_is_checked(given: dict[str, float], said: str) -> None:
    with pytest.raises(ParameterError) as raised:
        host_of(given)
    assert str(raised.value) == said


def test_devices_that_do_not_hold_two_layers_are_refused() -> None:
    with pytest.raises(ParameterError) as raised:
        splits_of(Offer.all_of({"rtx-3090": 2}), find_shape("deepseek-r1"))
    assert str(raised.value) == (
        "devices must hold the model, and none of those offered do: weights of 672.9 GB leave no room for "
        "KV in 48 GB of 2 x rtx-3090; offer more or larger ones"
    )


def test_devices_and_their_prices_are_named_in_any_case() -> None:
    [offer] = Offer.all_of({"H100": 2}, {"h100": 2.5})
    assert (offer.hardware.name, offer.price) == ("h100", 2.5)

"""Mixes have the density and the sharing asked for, exactly, and each draw is a request of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.simulation.mix_draws import Drawn, Sources, draw_mix
from llmbatch.simulation.mixes import MIXES, Mix, PrefixGroups, parse_mix
from llmbatch.simulation.traces import Trace, read_traces
from tests.support.paths import TRACES

COST = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))


def plain(name: str, prompt: Sequence[int], output: Sequence[int]) -> Trace:
    """A trace without ids."""
    return Trace(
        (name,),
        np.zeros(len(prompt), np.int32),
        np.array(prompt, np.int32),
        np.array(output, np.int32),
        np.empty(0, np.int32),
        np.zeros(len(prompt) + 1, np.int64),
        32,
    )


def known(name: str, prompts: list[list[int]], output: Sequence[int], size: int = 1) -> Trace:
    """A trace of ids of blocks of `size` tokens, equal where the prompts are up to the end of the block."""
    ids: dict[tuple[int, ...], int] = {}
    blocks = [
        ids.setdefault(tuple(prompt[: k + size]), len(ids)) for prompt in prompts for k in range(0, len(prompt), size)
    ]
    lengths = np.array([len(prompt) for prompt in prompts])
    return replace(
        plain(name, lengths.tolist(), output),
        blocks=np.array(blocks, np.int32),
        offsets=np.append(0, np.cumsum(-(-lengths // size))),
        block_size=size,
    )


def sources(seed: int = 0) -> list[Trace]:
    """Three small traces: long prompts; eight prefixes of 500 tokens; long answers."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, 100, (8, 500))
    questions = [[*prefixes[k % 8].tolist(), *rng.integers(0, 100, 60).tolist()] for k in range(160)]
    return [
        plain("code", rng.integers(500, 3000, 200).tolist(), [20] * 200),
        known("exam", questions, [2] * 160),
        plain("video", [10] * 100, rng.integers(1000, 5000, 100).tolist()),
    ]


def real(*names: str) -> list[Trace]:
    paths = [TRACES / f"{name}.parquet" for name in names]
    for path in paths:
        if not path.exists():
            pytest.skip(f"the trace {path} is not there; set LLMBATCH_TRACES to the folder of the traces")
    return read_traces(paths)


def density_and_sharing(trace: Trace) -> tuple[float, float]:
    """What the requests have by the formulas and the whole tree."""
    tree = trace.tree()
    p, d = trace.prompt_lengths, trace.output_lengths.astype(np.float64)
    saved = COST.prompt_seconds(tree.total_tokens - tree.unique_tokens)
    compute = COST.request_compute(p, d).sum() - saved
    return float(compute / COST.request_memory(p, d, d * d).sum()), tree.sharing


def prompts_of(trace: Trace) -> list[tuple[tuple[int, ...], int, int]]:
    """Ids, prompt length and output length of each row."""
    ids = [tuple(trace.blocks[a:b].tolist()) for a, b in zip(trace.offsets, trace.offsets[1:])]
    return list(zip(ids, trace.prompt_lengths.tolist(), trace.output_lengths.tolist()))


# --- names


def test_the_named_mixes_are_the_papers_and_one_more() -> None:
    assert [(mix.density, mix.sharing) for mix in MIXES.values()] == [
        (1.4, 0.35),
        (0.9, 0.35),
        (1.4, 0.05),
        (0.9, 0.05),
        (1.4, 0.35),
    ]
    assert parse_mix("Table2-3") is MIXES["table2-3"]
    assert parse_mix("wide-1").groups == PrefixGroups(groups=5000, rows=20, shared=1000, own=100, output=2)


def test_a_mix_can_be_given_in_numbers() -> None:
    assert parse_mix("1.15, .25") == Mix(1.15, 0.25)


@pytest.mark.parametrize("text", ["table3-1", "1.4", "1.4,.35,2", "", "a,b"])
def test_an_unknown_mix_is_refused(text: str) -> None:
    with pytest.raises(ParameterError) as error:
        parse_mix(text)
    assert str(error.value) == (
        "a mix must be one of table2-1, table2-2, table2-3, table2-4, wide-1 or two numbers DENSITY,SHARING (such as "
        f"1.4,0.35), got {text!r}"
    )


@pytest.mark.parametrize(
    ("text", "numbers"), [("0,.3", "0 and 0.3"), ("nan,.3", "nan and 0.3"), ("1,1", "1 and 1"), ("1,-.1", "1 and -0.1")]
)
def test_a_mix_that_cannot_be_is_refused(text: str, numbers: str) -> None:
    with pytest.raises(ParameterError) as error:
        parse_mix(text)
    assert str(error.value) == (f"density of a mix must be positive and its sharing in [0, 1), got {numbers}")


# --- exact totals


@given(st.data())
def test_totals_of_any_counts_are_those_of_the_tree(data: st.DataObject) -> None:
    prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8)
    length = data.draw(st.integers(1, 20))
    traces = [
        known(name, drawn := data.draw(prompts), [3] * len(drawn), data.draw(st.sampled_from([1, 2, 5])))
        for name in "abc"
    ]
    drawn_from = Sources.of((traces[0], traces[1], traces[2]), COST)
    streams = drawn_from.streams(length, np.random.default_rng(data.draw(st.integers(0, 99))))
    a, b, c = (data.draw(st.integers(0, length)) for _ in range(3))
    if a + b + c == 0:
        a = 1
    density, sharing = density_and_sharing(drawn_from.trace.take(streams.first(a, b, c)))
    assert streams.density(a, b, c) == pytest.approx(density, rel=1e-12)
    assert streams.sharing(a, b, c) == pytest.approx(sharing, abs=1e-12)


def test_totals_are_those_of_the_tree_with_blocks_of_three_sizes() -> None:
    code, exam, _ = sources()
    groups = PrefixGroups(groups=4, rows=5, shared=24, own=7, output=2).trace()
    drawn_from = Sources.of((code, groups, exam), COST)
    streams = drawn_from.streams(60, np.random.default_rng(0))
    density, sharing = density_and_sharing(drawn_from.trace.take(streams.first(10, 50, 60)))
    assert streams.density(10, 50, 60) == pytest.approx(density, rel=1e-12)
    assert streams.sharing(10, 50, 60) == pytest.approx(sharing, abs=1e-12)


# --- drawing


def assert_has(drawn: Drawn, mix: Mix, requests: int) -> None:
    density, sharing = density_and_sharing(drawn.trace)
    assert drawn.density == pytest.approx(density, rel=1e-9)
    assert drawn.sharing == pytest.approx(sharing, abs=1e-12)
    assert drawn.density == pytest.approx(mix.density, rel=0.01)
    assert drawn.sharing == pytest.approx(mix.sharing, abs=0.005)
    assert len(drawn.trace) == sum(drawn.counts) == requests


@pytest.mark.parametrize("name", list(MIXES))
def test_named_mixes_of_real_traces_have_what_they_promise(name: str) -> None:
    traces = real("azure2023_code", "mmlu_5shot", "video_panda70m")
    assert_has(draw_mix(traces, MIXES[name], 20_000, COST, 1), MIXES[name], 20_000)


@pytest.mark.parametrize("density", [0.8, 1.4])
@pytest.mark.parametrize("sharing", [0.05, 0.45])
def test_small_mixes_are_drawn_again_until_they_fit(density: float, sharing: float) -> None:
    mix = Mix(density, sharing)
    assert_has(draw_mix(sources(), mix, 400, COST, 0), mix, 400)


def test_the_seed_decides_the_rows_and_their_order() -> None:
    mix = Mix(1.4, 0.35)
    first, same, other = (draw_mix(sources(), mix, 2000, COST, seed) for seed in (5, 5, 6))
    assert first.counts == same.counts
    assert prompts_of(first.trace) == prompts_of(same.trace)
    assert prompts_of(first.trace) != prompts_of(other.trace)


def test_requests_of_the_sources_are_shuffled() -> None:
    drawn = draw_mix(sources(), Mix(1.4, 0.35), 2000, COST, 0)
    half = np.bincount(drawn.trace.source[:1000], minlength=3)
    assert half[:2] == pytest.approx(np.array(drawn.counts[:2]) / 2, rel=0.15)


def test_a_source_is_drawn_through_again_and_again() -> None:
    traces = sources()
    traces[1] = replace(traces[1], output_lengths=np.arange(1, 161, dtype=np.int32))
    drawn = draw_mix(traces, Mix(0.6, 0.35), 2000, COST, 0)
    times = np.bincount(drawn.trace.output_lengths[drawn.trace.source == 1], minlength=161)[1:]
    assert drawn.counts[1] > 160
    assert times.max() - times.min() <= 1


def test_each_source_gets_a_system_prompt_of_its_own() -> None:
    drawn = draw_mix(sources(), Mix(1.4, 0.35), 2000, COST, 0)
    tree, source = drawn.trace.tree(), drawn.trace.source
    assert drawn.trace.names == ("code", "exam", "video")
    assert drawn.trace.prompt_lengths[source == 2].tolist() == [42] * drawn.counts[2]
    depths = [int(tree.lcp[k]) for k in range(1, 2000) if source[tree.rows[k]] != source[tree.rows[k - 1]]]
    assert depths == [0, 0]
    assert tree.lcp.tolist().count(0) == 3


def test_draws_of_one_row_share_what_it_shares_with_other_rows_alone() -> None:
    exam = known("exam", [[1, 2, 3, 4, 5], [1, 2, 3, 9], [7, 7]], [2, 2, 2])
    code, _, video = sources()
    drawn_from = Sources.of((code, exam, video), COST)
    twice = drawn_from.trace.take(np.array([200, 200, 201, 202, 202]))
    assert twice.prompt_lengths.tolist() == [37, 37, 36, 34, 34]
    assert sorted(twice.tree().lcp.tolist()) == [0, 32, 32, 35, 35]


def test_equal_rows_share_all_of_their_text() -> None:
    exam = known("exam", [[1, 2, 3], [1, 2, 3]], [2, 2])
    code, _, video = sources()
    twice = Sources.of((code, exam, video), COST).trace.take(np.array([200, 201, 200]))
    assert twice.tree().lcp.tolist() == [0, 35, 35]


# --- groups


def test_rows_of_a_group_share_their_first_tokens() -> None:
    trace = PrefixGroups(groups=3, rows=4, shared=10, own=5, output=2).trace()
    assert trace.prompt_lengths.tolist() == [15] * 12
    assert trace.output_lengths.tolist() == [2] * 12
    assert trace.tree().lcp.tolist() == [0, 10, 10, 10] * 3


def test_groups_stand_in_for_the_second_trace() -> None:
    mix = Mix(1.4, 0.35, PrefixGroups(groups=20, rows=5, shared=500, own=60, output=2))
    code, exam, video = sources()
    two, three = (draw_mix(traces, mix, 2000, COST, 0) for traces in ([code, video], [code, exam, video]))
    assert two.trace.names == three.trace.names == ("code", "groups", "video")
    assert prompts_of(two.trace) == prompts_of(three.trace)
    assert_has(two, mix, 2000)


# --- what bad input gets


def refused(traces: Sequence[Trace], mix: Mix, requests: int = 1000, seed: int = 0) -> str:
    with pytest.raises(ParameterError) as error:
        draw_mix(traces, mix, requests, COST, seed)
    return str(error.value)


def even() -> list[Trace]:
    """Three traces of equal rows, whose densities are known."""
    return [plain("a", [1000] * 9, [10] * 9), plain("b", [100] * 9, [10] * 9), plain("c", [10] * 9, [5000] * 9)]


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_traces_is_refused(count: int) -> None:
    assert refused((sources() + sources())[:count], Mix(1.4, 0.35)) == (
        f"this mix must have three traces, got {count}: name the compute-heavy, the prefix-sharing and the "
        "memory-heavy one, in this order"
    )


def test_another_number_of_traces_beside_groups_is_refused() -> None:
    assert refused(sources()[:1], MIXES["wide-1"]) == (
        "this mix must have two traces, or three, the second being replaced, got 1: name the "
        "compute-heavy, the prefix-sharing and the memory-heavy one, in this order"
    )


def test_a_source_in_two_traces_is_refused() -> None:
    code, exam, _ = sources()
    assert refused([code, exam, code], Mix(1.4, 0.35)) == (
        "the traces of a mix must be of different sources, but 'code' is in two of them: give it another name in "
        "the column source"
    )


def test_traces_in_another_order_are_refused() -> None:
    assert refused(even()[::-1], Mix(1.4, 0.1)) == (
        "the first trace of a mix must have a higher compute density than the third, got 0.358 and 89.9: "
        "name the compute-heavy trace first and the memory-heavy one last"
    )


def test_a_density_out_of_reach_is_refused_with_the_range() -> None:
    assert refused(even(), Mix(500, 0.1)) == (
        "the density of 1000 requests of these traces must be 0.358 to 89.9, got 500: choose one in "
        "between, or other traces"
    )


def test_a_sharing_out_of_reach_is_refused_with_the_range() -> None:
    assert refused(even(), Mix(1.4, 0.9)) == (
        "at a density of 1.4 the sharing of 1000 requests of these traces must be 0.033 to 0.227, got 0.9"
        ": choose one in between, other traces or more requests"
    )


def test_too_few_requests_for_a_mix_are_refused() -> None:
    assert refused(even(), Mix(1.4, 0.1), requests=3) == (
        "no counts of 3 requests of these traces came within 1 % of a density of 1.4 and .005 of a sharing of 0.1 in "
        "300 draws: ask for more requests"
    )


def test_no_requests_are_refused() -> None:
    assert refused(even(), Mix(1.4, 0.1), requests=0) == "requests of a mix must be at least 1, got 0"


def test_a_negative_seed_is_refused() -> None:
    assert refused(even(), Mix(1.4, 0.1), seed=-1) == "seed of a mix must be at least 0, got -1"

"""Traces are read as they are written, share what their ids say, and are refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.errors import DataError, InputError, ParameterError
from llmbatch.simulation.traces import Trace, put_together, read_traces
from tests.support.paths import TRACES

Write = Callable[..., Path]

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write columns, given as lists or Arrow arrays, to a Parquet file of that name."""

    def write(name: str = "trace", **columns: Any) -> Path:
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table(columns), path)
        return path

    return write


def hashed(prompts: list[list[int]], size: int) -> list[list[int]]:
    """Ids of blocks of `size` tokens: equal where the prompts are up to the end of the block."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        [ids.setdefault(tuple(prompt[: k + size]), 1000 + len(ids)) for k in range(0, len(prompt), size)]
        for prompt in prompts
    ]


def trace_of(prompts: list[list[int]], size: int) -> Trace:
    """The prompts as a trace of ids of blocks of `size` tokens."""
    ids = hashed(prompts, size)
    return Trace(
        ("a",),
        np.zeros(len(prompts), np.int32),
        np.array([len(prompt) for prompt in prompts], np.int32),
        np.ones(len(prompts), np.int32),
        np.array([block for row in ids for block in row], np.int32),
        np.append(0, np.cumsum([len(row) for row in ids])),
        size,
    )


def rows_of(trace: Trace) -> list[list[int]]:
    return [trace.blocks[first:last].tolist() for first, last in zip(trace.offsets, trace.offsets[1:])]


def shared(trace: Trace) -> int:
    """Prompt tokens that need not be computed twice."""
    tree = trace.tree()
    return tree.total_tokens - tree.unique_tokens


def real(*names: str) -> list[Path]:
    paths = [TRACES / f"{name}.parquet" for name in names]
    for path in paths:
        if not path.exists():
            pytest.skip(f"the trace {path} is not there; set LLMBATCH_TRACES to the folder of the traces")
    return paths


# --- reading


def test_rows_keep_the_order_and_the_lengths_of_the_file(write: Write) -> None:
    path = write(source=["b", "a", "b"], prompt_tokens=[5, 6, 7], output_tokens=[1, 2, 3])
    trace = read_traces([path])[0]
    assert trace.names == ("b", "a")
    assert trace.source.tolist() == [0, 1, 0]
    assert trace.prompt_lengths.tolist() == [5, 6, 7]
    assert trace.output_lengths.tolist() == [1, 2, 3]
    assert len(trace) == 3


@pytest.mark.parametrize("source", [{}, {"source": pa.nulls(2)}, {"source": pa.array([None, "chat"])}])
def test_a_row_without_source_is_of_the_file(write: Write, source: dict[str, Any]) -> None:
    trace = read_traces([write("chat", **source, prompt_tokens=[5, 6], output_tokens=[1, 2])])[0]
    assert trace.names == ("chat",)
    assert trace.source.tolist() == [0, 0]


def test_exact_prompts_tell_their_lengths(write: Write) -> None:
    trace = read_traces([write(prompt_ids=[[7, 7, 7], [7]], output_tokens=[1, 2])])[0]
    assert trace.prompt_lengths.tolist() == [3, 1]
    assert rows_of(trace) == [[7, 7, 7], [7]]
    assert trace.block_size == 1


def test_exact_prompts_come_before_block_ids(write: Write) -> None:
    path = write(prompt_tokens=[3], prompt_ids=[[7, 8, 9]], hash_ids=[[1]], output_tokens=[1])
    assert read_traces([path])[0].block_size == 1


def test_a_column_without_values_is_not_there(write: Write) -> None:
    path = write(prompt_tokens=[3, 4], hash_ids=pa.nulls(2, pa.list_(pa.int64())), output_tokens=[1, 1])
    assert rows_of(read_traces([path])[0]) == [[], []]


def test_equal_exact_prompts_share_between_files(write: Write) -> None:
    first = write("first", prompt_ids=[[1, 2, 3]], output_tokens=[1])
    second = write("second", prompt_ids=[[1, 2, 4]], output_tokens=[1])
    assert shared(put_together(read_traces([first, second]))) == 2


def test_block_ids_are_local_to_a_file(write: Write) -> None:
    columns = {"prompt_tokens": [20, 40], "hash_ids": [[3, 4], [3, 4, 5]], "output_tokens": [1, 1]}
    once = read_traces([write("first", **columns)])
    twice = read_traces([write("first", **columns), write("second", **columns)])
    assert shared(put_together(once)) == 20
    assert shared(put_together(twice)) == 40


def test_block_ids_are_never_mistaken_for_tokens(write: Write) -> None:
    blocks = write("blocks", prompt_tokens=[1], hash_ids=[[5]], output_tokens=[1])
    tokens = write("tokens", prompt_ids=[[0, 5], [5, 0]], output_tokens=[1, 1])
    assert shared(put_together(read_traces([blocks, tokens]))) == 0
    assert shared(put_together(read_traces([tokens, blocks]))) == 0


def test_a_real_trace_shares_what_its_notes_say() -> None:
    trace = read_traces(real("mmlu_5shot"))[0]
    assert len(trace) == 14042
    assert trace.names == ("mmlu",)
    assert trace.tree().sharing == pytest.approx(0.854, abs=5e-4)


# --- block sizes


@given(PROMPTS, st.sampled_from([1, 2, 3, 6]))
def test_smaller_blocks_of_a_trace_share_the_same_tokens(prompts: list[list[int]], size: int) -> None:
    trace = trace_of(prompts, 6)
    assert trace.split(size).block_size == size
    assert np.array_equal(trace.split(size).tree().lcp, trace.tree().lcp)


@given(PROMPTS, PROMPTS)
def test_traces_of_two_block_sizes_share_together_what_each_shares(
    tokens: list[list[int]], blocks: list[list[int]]
) -> None:
    a, b = trace_of(tokens, 1), trace_of(blocks, 4)
    b.blocks[:] += 10**6
    assert shared(put_together([a, b])) == shared(a) + shared(b)


def test_system_prompts_and_odd_blocks_go_together(write: Write) -> None:
    blocks = write("blocks", prompt_tokens=[25, 24], hash_ids=[[3, 4, 5], [3, 4, 6]], output_tokens=[1, 1])
    plain = write("plain", prompt_tokens=[10, 10], output_tokens=[1, 1])
    together = put_together(read_traces([blocks, plain], hash_block=10))
    assert together.block_size == 2
    assert shared(together) == 20 + 32


# --- putting together


def test_rows_without_ids_get_the_system_prompt_of_their_source(write: Write) -> None:
    path = write(source=["a", "b", "a"], prompt_tokens=[5, 6, 5], output_tokens=[1, 2, 3])
    together = put_together(read_traces([path]))
    assert together.prompt_lengths.tolist() == [37, 38, 37]
    assert together.tree().lcp.tolist() == [0, 32, 0]


def test_a_source_in_two_files_has_one_system_prompt(write: Write) -> None:
    first = write("first", source=["a"], prompt_tokens=[5], output_tokens=[1])
    second = write("second", source=["b", "a"], prompt_tokens=[6, 7], output_tokens=[2, 3])
    together = put_together(read_traces([first, second]))
    assert together.names == ("a", "b")
    assert together.source.tolist() == [0, 1, 0]
    assert shared(together) == 32


def test_rows_with_ids_are_taken_as_they_are(write: Write) -> None:
    blocks = write("blocks", prompt_tokens=[20, 30], hash_ids=[[3, 4], [3, 5]], output_tokens=[1, 1])
    plain = write("plain", prompt_tokens=[5], output_tokens=[9])
    read = read_traces([plain, blocks])
    together = put_together(read)
    assert together.prompt_lengths.tolist() == [37, 20, 30]
    assert together.output_lengths.tolist() == [9, 1, 1]
    assert rows_of(together)[1:] == rows_of(read[1])


def test_real_traces_are_put_together_whole() -> None:
    together = put_together(read_traces(real("azure2023_code", "gsm8k_5shot")))
    assert len(together) == 8819 + 1319
    tree = together.tree()
    azure = together.source == 0
    assert tree.select(azure).unique_tokens == together.prompt_lengths[azure].sum() - 32 * 8818
    assert tree.select(~azure).sharing == pytest.approx(read_traces(real("gsm8k_5shot"))[0].tree().sharing)


def test_the_first_requests_can_be_had_alone(write: Write) -> None:
    trace = read_traces([write(prompt_ids=[[1], [2, 3], [4]], output_tokens=[1, 2, 3])])[0]
    assert rows_of(trace.first(2)) == [[1], [2, 3]]
    assert trace.first(2).output_lengths.tolist() == [1, 2]


def test_a_row_taken_twice_shares_what_its_ids_tell() -> None:
    trace = trace_of([[0, 1, 0, 1, 0]], 2)
    assert shared(trace.take(np.array([0, 0]))) == 5
    assert shared(trace.cut(np.array([2])).take(np.array([0, 0]))) == 4


# --- what bad input gets


@pytest.mark.parametrize("requests", [0, 4])
def test_more_requests_than_there_are_are_refused(requests: int) -> None:
    with pytest.raises(ParameterError) as error:
        trace_of([[0], [1], [1]], 1).first(requests)
    assert str(error.value) == (f"requests must be 1 to the 3 of the traces, got {requests}")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"prompt_tokens": [5]},
            "a trace must have output_tokens (the lengths of its answers), but PATH has none: add them",
        ),
        (
            {"prompt_tokens": [5], "output_tokens": pa.nulls(1)},
            "a trace must have output_tokens (the lengths of its answers), but PATH has none: add them",
        ),
        (
            {"output_tokens": [5], "hash_ids": [[1]]},
            "a trace must have prompt_tokens (the lengths of its prompts) or prompt_ids (the prompts), but PATH has "
            "neither: add one of them",
        ),
        (
            {"prompt_tokens": pa.array([], pa.int32()), "output_tokens": pa.array([], pa.int32())},
            "a trace must have at least one request, but PATH has no rows: leave it out",
        ),
        (
            {"prompt_tokens": [5, 6], "output_tokens": [1, -4]},
            "output_tokens must lie in [1, 1073741823], but row 1 of PATH has -4: correct it or leave the row out",
        ),
        (
            {"prompt_tokens": [5, 0, -1], "output_tokens": [1, 1, 1]},
            "prompt_tokens must lie in [1, 1073741823], but row 1 of PATH has 0: correct it or leave the row out",
        ),
        (
            {"prompt_tokens": [5, 1 << 40], "output_tokens": [1, 1]},
            "prompt_tokens must lie in [1, 1073741823], but row 1 of PATH has 1099511627776: correct it or leave "
            "the row out",
        ),
        (
            {"prompt_tokens": [5, None], "output_tokens": [1, 1]},
            "the column prompt_tokens of a trace must have no nulls, but row 1 of PATH has one",
        ),
        (
            {"prompt_tokens": [5, 5], "output_tokens": [1, 1], "hash_ids": [[1], None]},
            "the column hash_ids of a trace must have no nulls, but row 1 of PATH has one",
        ),
        (
            {"prompt_ids": [[1, 2], [], [3, None]], "output_tokens": [1, 1, 1]},
            "the column prompt_ids of a trace must have no nulls, but row 2 of PATH has one",
        ),
        (
            {"prompt_tokens": [2.5], "output_tokens": [1]},
            "the column prompt_tokens of a trace must hold integers, but that of PATH holds double: convert it",
        ),
        (
            {"prompt_tokens": [5], "output_tokens": [1], "hash_ids": [7]},
            "the column hash_ids of a trace must hold lists of integers, but that of PATH holds int64: convert it",
        ),
        (
            {"prompt_ids": [[1 << 31]], "output_tokens": [1]},
            "the column prompt_ids of a trace must hold lists of token ids (int32), but that of PATH holds "
            "list<element: int64>: convert it",
        ),
        (
            {"prompt_ids": [[1], [2, -3]], "output_tokens": [1, 1]},
            "token ids must lie in [0, 1073741823], but row 1 of PATH has -3 in prompt_ids",
        ),
        (
            {"prompt_ids": [[1], []], "output_tokens": [1, 1]},
            "a prompt must have at least one token, but row 1 of PATH has no prompt_ids",
        ),
        (
            {"prompt_ids": [[1], [2]], "prompt_tokens": [1, 9], "output_tokens": [1, 1]},
            "prompt_tokens must be the number of prompt_ids, but row 1 of PATH has 9 and 1: correct the column or "
            "leave it out",
        ),
        (
            {"prompt_tokens": [16, 100], "hash_ids": [[1], [1, 2, 3]], "output_tokens": [1, 1]},
            "hash_ids must be one for each block of 16 tokens, but row 1 of PATH has 3 for 100 tokens, not 7: give "
            "the block size they were made with (--hash-block)",
        ),
    ],
)
def test_a_trace_that_breaks_a_rule_is_refused(write: Write, columns: dict[str, Any], message: str) -> None:
    path = write(**columns)
    with pytest.raises(DataError) as error:
        read_traces([path])
    assert str(error.value) == message.replace("PATH", str(path))


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_traces([tmp_path / "none.parquet"])
    assert str(error.value) == (
        f"a trace must be a Parquet file, but there is none at {tmp_path / 'none.parquet'}: check the path"
    )


def test_a_trace_in_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens\n1,1\n")
    with pytest.raises(DataError) as error:
        read_traces([path])
    assert str(error.value).startswith(f"a trace must be a Parquet file, but {path} cannot be read as one (")


@pytest.mark.parametrize(
    ("paths", "hash_block", "message"),
    [
        ([], 16, "traces must be at least one, got none: name Parquet files"),
        (["x"], 0, "hash_block (--hash-block) must be 1 to 1073741823 tokens, got 0"),
    ],
)
def test_a_parameter_that_breaks_a_rule_is_refused(paths: list[str], hash_block: int, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_traces(paths, hash_block=hash_block)
    assert str(error.value) == message


def test_a_prompt_that_ends_within_a_block_is_a_prefix_of_those_that_fill_it(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    columns = {"prompt_tokens": [20, 16, 2], "output_tokens": [1, 1, 1], "hash_ids": [[7, 8], [7], [7]]}
    pq.write_table(pa.table(columns), path)
    tree = read_traces([path])[0].tree()
    assert tree.rows.tolist() == [2, 1, 0]
    assert tree.lcp.tolist() == [0, 2, 16]

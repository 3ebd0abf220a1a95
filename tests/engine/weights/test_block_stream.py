"""Blocks come to memory in the order in which they are taken, and what was not expected comes all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbatch.engine.weights.block_file import BlockFile
from llmbatch.engine.weights.block_stream import BlockStream

COUNT = 6
SIZE = 8


class Shelf:
    """Blocks that hold their number; notes which are read."""

    def __init__(self) -> None:
        self.read_blocks: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def read(self, block: int, target: NDArray[np.uint8]) -> None:
        self.read_blocks.append(block)
        target[:] = block


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def stream(shelf: Shelf) -> BlockStream:
    return BlockStream(shelf, [np.zeros(SIZE, np.uint8) for _ in range(2)])


def test_blocks_taken_round_and_round_are_read_once_each(shelf: Shelf, stream: BlockStream) -> None:
    for block in [*range(COUNT), *range(COUNT)]:
        assert stream.take(block).tolist() == [block] * SIZE
    assert shelf.read_blocks[: 2 * COUNT] == [*range(COUNT), *range(COUNT)]


def test_blocks_come_in_any_order(stream: BlockStream) -> None:
    for block in np.random.default_rng(0).integers(0, COUNT, 50).tolist():
        assert stream.take(block).tolist() == [block] * SIZE


def test_only_expected_blocks_are_read_where_others_are_not_to_follow(shelf: Shelf, stream: BlockStream) -> None:
    stream.expect([1, 4], onward=False)
    assert [stream.take(block)[0] for block in (1, 4)] == [1, 4]
    assert shelf.read_blocks == [1, 4]


def test_blocks_after_those_expected_follow_if_they_are_to(shelf: Shelf, stream: BlockStream) -> None:
    stream.expect([1, 4], onward=True)
    for block in (1, 4, 5, 0):
        stream.take(block)
    assert shelf.read_blocks[:4] == [1, 4, 5, 0]


def test_blocks_on_their_way_that_are_expected_are_not_read_again(shelf: Shelf, stream: BlockStream) -> None:
    stream.take(0)
    stream.expect([1, 3], onward=False)
    assert [stream.take(block)[0] for block in (1, 3)] == [1, 3]
    assert shelf.read_blocks == [0, 1, 3]


def test_a_file_gives_back_the_arrays_of_a_block(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, size, dtype=np.uint8) for size in (3, 100, 64)]
    file = BlockFile(tmp_path)
    file.append([np.ones(5, np.uint8)])
    block, places = file.append(arrays)
    target = np.zeros(file.largest, np.uint8)
    file.read(block, target)
    for array, place in zip(arrays, places, strict=True):
        assert target[place : place + array.nbytes].tolist() == array.tolist()


def test_a_file_has_no_name_that_a_kill_could_leave_behind(tmp_path: Path) -> None:
    file = BlockFile(tmp_path)
    file.append([np.ones(5, np.uint8)])
    assert not list(tmp_path.iterdir())
    assert file.bytes_per_second() > 0

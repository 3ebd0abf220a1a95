"""Layers of which some are in a file: packed as the others are, and brought to memory in their turn.

What is read is what products take: nothing is packed anew at a step. Layers that stay are spread among the others, so
that each of those has the time of some layers to come.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.cpu.linear import PackedWeight
from llmbatch.engine.cpu.memory import huge_pages
from llmbatch.engine.weights.block_file import BlockFile
from llmbatch.engine.weights.block_stream import BlockSource, BlockStream
from llmbatch.engine.weights.residency import StreamedWeights, kept_blocks, spread
from llmbatch.perf_model.residency import BUFFERS


def open_stream(file: BlockFile, kept: int) -> tuple[BlockStream, StreamedWeights]:
    """Return the stream of a file that is complete, beside `kept` bytes that stay, and what each step reads of it."""
    rate = file.bytes_per_second()
    buffers = [huge_pages((file.largest,), np.uint8) for _ in range(BUFFERS)]
    beside = kept + sum(buffer.nbytes for buffer in buffers)
    return BlockStream(file, buffers), StreamedWeights(beside, file.bytes, rate)


class StreamedLayers:
    """Decides which layers stay, writes the others to a file, and brings them when they are to run."""

    def __init__(self, memory: int, around: int, folder: Path) -> None:
        """Begin with so much memory for all weights, `around` of it for those of no layer; the file is in a folder."""
        self._memory = memory
        self._around = around
        self._file = BlockFile(folder)
        self._stays: list[bool] = []
        self._places: dict[int, tuple[int, NDArray[np.int64]]] = {}  # by layer: its block, and its products in that
        self._stream: BlockSource | None = None
        self._size = 0

    def store(self, layer: int, count: int, packed: list[PackedWeight]) -> None:
        """Take a layer of so many, which are alike, in their order: it stays, or its weights go to the file."""
        self._size = sum(weight.panels.nbytes for weight in packed)
        if layer == 0:
            self._stays = spread(count, kept_blocks(self._memory - self._around, count, self._size))
        if self._stays[layer]:
            return
        block, places = self._file.append([weight.panels for weight in packed])
        self._places[layer] = block, np.array(places, np.int64)
        for weight in packed:
            weight.panels = np.broadcast_to(np.uint32(0), weight.panels.shape)  # of the same shape, and no memory

    def open(self) -> StreamedWeights | None:
        """Open the stream when all layers are stored; returns what each step reads, None where all stay."""
        if not len(self._file):
            return None
        self._stream, weights = open_stream(self._file, self._around + sum(self._stays) * self._size)
        return weights

    def spans(self, first: int, end: int, panels: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Go through the layers [first, end) in spans that are in memory; `panels` get the addresses of each."""
        begun = first
        for layer in range(first, end):
            if layer not in self._places:
                continue
            if layer > begun:
                yield begun, layer
            assert self._stream is not None, "it is open"
            block, places = self._places[layer]
            panels[layer] = self._stream.take(block).ctypes.data + places
            yield layer, layer + 1
            begun = layer + 1
        if end > begun:
            yield begun, end

"""A processor computes in bfloat16 where the products of layers are faster in it, by the rows that are faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llmbatch.engine.cpu.linear import PackedWeight
from llmbatch.engine.model import number_type, outline
from llmbatch.engine.model.number_type import (
    attention_rows,
    bfloat16_gain,
    bfloat16_rows,
    fastest_type,
    widened_gain,
)
from llmbatch.kernels.cpu.tiles import matrix_unit


@pytest.mark.parametrize(("gain", "expected"), [(0.0, "float32"), (0.8, "float32"), (0.9, "bfloat16")])
def test_the_type_is_that_of_the_faster_product(
    gain: float, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(number_type, "bfloat16_gain", lambda: gain)
    assert outline._element("auto") is None
    assert fastest_type() == expected
    assert outline._element("auto") == outline.NamedType(expected, 2 if expected == "bfloat16" else 4)


def test_products_of_either_type_are_timed_where_there_are_instructions_for_both() -> None:
    assert (bfloat16_gain() > 0) == torch.cpu._is_avx512_bf16_supported()


@pytest.fixture
def asked_again() -> Iterator[None]:
    """A process asks once."""
    bfloat16_rows.cache_clear()
    yield
    bfloat16_rows.cache_clear()


@pytest.mark.parametrize(("gain", "expected"), [(0.5, np.uint16), (1.7, np.uint32)])
def test_rows_of_bfloat16_are_widened_where_that_is_faster(
    gain: float, expected: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked_again: None
) -> None:
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(matrix_unit, "HAS_MATRICES", False)
    monkeypatch.setattr(number_type, "widened_gain", lambda: gain)
    weight = PackedWeight([(torch.ones(4, 8, dtype=torch.bfloat16), None)])
    assert bfloat16_rows() == weight.row_type == np.dtype(expected)
    assert weight.row_bytes == 8 * weight.row_type.itemsize
    assert weight.panels.shape[1] == 4  # words of two elements, whatever rows are
    assert PackedWeight([(torch.ones(4, 8), None)]).row_type == np.float32


@pytest.mark.skipif(not matrix_unit.HAS_MATRICES, reason="this processor has no matrix unit")
def test_a_matrix_unit_takes_pairs_and_attention_beside_it_widened_rows(asked_again: None) -> None:
    assert bfloat16_rows() == np.dtype(np.uint16)
    assert attention_rows() == np.dtype(np.uint32)


def test_both_kinds_of_rows_are_timed() -> None:
    assert 0.1 < widened_gain() < 10

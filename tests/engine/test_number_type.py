"""A processor computes in bfloat16 where the products of layers are faster in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmbatch.engine.model import number_type, outline
from llmbatch.engine.model.number_type import bfloat16_gain, fastest_type


@pytest.mark.parametrize(("gain", "expected"), [(0.0, "float32"), (0.9, "float32"), (1.1, "bfloat16")])
def test_the_type_is_that_of_the_faster_product(
    gain: float, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(number_type, "bfloat16_gain", lambda: gain)
    assert outline._element("auto") is None
    assert fastest_type() is getattr(torch, expected)
    assert outline._element("auto") == outline.NamedType(expected, 2 if expected == "bfloat16" else 4)


def test_products_of_either_type_are_timed_where_there_are_instructions_for_both() -> None:
    assert (bfloat16_gain() > 0) == torch.cpu._is_avx512_bf16_supported()

"""What is known of a family before its weights are loaded: what it costs, and whether ranks can share it."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from llmbatch import LLMOperator
from llmbatch.engine.ranks.plan import SplitPlan, check_heads
from llmbatch.errors import ModelError, ParameterError
from llmbatch.perf_model.shape import ModelShape
from tests.support.families import TABLE
from tests.support.models import tiny_model, tiny_model_folder

_NOT_COUNTED = ("visual", "vision", "position", "wpe", "projector")  # parts of a name


@pytest.mark.parametrize("name", TABLE)
def test_a_shape_has_the_parameters_of_the_model(name: str) -> None:
    model = tiny_model(name)
    parameters = {id(tensor): tensor for key, tensor in model.named_parameters() if not _is_left_out(key)}
    count = sum(tensor.numel() for tensor in parameters.values())
    shape = ModelShape.from_config(model.config, 4)
    assert 0.8 * count <= shape.params_total <= 1.05 * count
    assert 0 < shape.params <= shape.params_total


def _is_left_out(key: str) -> bool:
    return any(part in key for part in _NOT_COUNTED)


@pytest.mark.parametrize("name", TABLE)
def test_ranks_have_a_plan_for_a_family_or_refuse_it(name: str) -> None:
    model = tiny_model(name)
    try:
        check_heads("tiny", model.config.get_text_config(), 2)
        plan = SplitPlan.of("tiny", model)
    except (ParameterError, ModelError) as refused:
        said = str(refused)
    else:
        assert plan.cuts
        said = f"{len(plan.sums)} sums"
    assert re.search(r"^tensor_parallel must divide|ranks split q_proj, k_proj|^[1-9][0-9]* sums$", said)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_family_whose_layers_differ_runs_from_its_folder(tmp_path: Path, name: str) -> None:
    operator = LLMOperator(model=tiny_model_folder(tmp_path, name), prompt="text", max_tokens=3, dtype="float32")
    answered = operator(pa.table({"text": ["a", "b"]}))
    assert answered["error"].null_count == 2

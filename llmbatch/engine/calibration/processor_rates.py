"""What steps take on a processor, kept from job to job: the rates that were fitted to the steps of an earlier one.

A job on a processor needs no calibration. The engine times every step, and a job of a few dozen steps says what the
next ones take (`llmbatch.runtime.refit`). So nothing is timed before a job: the first job of a model on a machine
begins with what numpy reaches there, and each later one with what steps of that model took.

Rates hold for a processor, its number of cores in use, a shape and a type, and one version of the kernels.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Final

from llmbatch._version import __version__
from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import Hardware
from llmbatch.perf_model.shape import ModelShape
from llmbatch.system.measurements import keep_figures, recalled_figures

_NAME: Final = "steps"


def keep_rates(cost: CostModel) -> None:
    """Keep the rates of a model on this processor, in place of those that were kept before."""
    every = asdict(cost.hardware)
    figures = {name: every[name] for name in every.keys() - {"name", "memory", "cards"} if every[name] is not None}
    keep_figures(_NAME, figures, *_versions(cost.shape))


def recall_rates(shape: ModelShape) -> Hardware | None:
    """Return this processor with the rates of a model of that shape and type, or None where no job has run it."""
    figures = recalled_figures(_NAME, *_versions(shape))
    if figures is None:
        return None
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        return Hardware(
            name="cpu",
            compute=figures["compute"],
            bandwidth=figures["bandwidth"],
            memory=memory,
            compute_efficiency=figures["compute_efficiency"],
            bandwidth_efficiency=figures["bandwidth_efficiency"],
            attention_efficiency=figures.get("attention_efficiency"),
            weight_efficiency=figures["weight_efficiency"],
            weight_overlap=figures["weight_overlap"],
            expert_tile=1,
        )
    except (ParameterError, KeyError):  # not a file of ours
        return None


def _versions(shape: ModelShape) -> tuple[str, ...]:
    return repr(shape), __version__

"""llmbatch: run a large language model over a dataset, for throughput.

    import llmbatch
    report = llmbatch.run("questions.parquet", "answers", model="Qwen/Qwen3-8B", prompt="question", chat=True)

Nothing heavy is imported before it is used. Importing llmbatch adds two finders to `sys.meta_path`: the last one says
where modules of earlier versions are now, the first one waits for Polars, pandas and lm-evaluation-harness to be
imported, and registers with them (`llmbatch._namespaces`). What a job changes: `llmbatch.system.tuning`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmbatch._moved import MOVED, watch_old_paths
from llmbatch._namespaces import watch_libraries
from llmbatch._version import __version__

if TYPE_CHECKING:
    from llmbatch.errors import (
        DataError,
        InputError,
        JobError,
        JobStopped,
        LLMBatchError,
        ModelError,
        OtherCommandError,
        ParameterError,
        StoppedEarly,
        StorageError,
    )
    from llmbatch.inference.progress import Advance, Progress
    from llmbatch.inference.report import Report
    from llmbatch.jobs.explain import explain
    from llmbatch.jobs.forecast import Forecast
    from llmbatch.jobs.job import run
    from llmbatch.operators.llm import LLMOperator
    from llmbatch.operators.ray.dataset import map_dataset
    from llmbatch.preprocess.sampling_params import SamplingParams
    from llmbatch.runtime.cancellation import StopRequest
    from llmbatch.serving.serve import serve
    from llmbatch.simulation.experiment import simulate
    from llmbatch.simulation.simulator import SimulationReport

_HOME = {
    "Advance": "llmbatch.inference.progress",
    "DataError": "llmbatch.errors",
    "Forecast": "llmbatch.jobs.forecast",
    "InputError": "llmbatch.errors",
    "JobError": "llmbatch.errors",
    "JobStopped": "llmbatch.errors",
    "LLMBatchError": "llmbatch.errors",
    "LLMOperator": "llmbatch.operators.llm",
    "ModelError": "llmbatch.errors",
    "OtherCommandError": "llmbatch.errors",
    "ParameterError": "llmbatch.errors",
    "Progress": "llmbatch.inference.progress",
    "Report": "llmbatch.inference.report",
    "SamplingParams": "llmbatch.preprocess.sampling_params",
    "SimulationReport": "llmbatch.simulation.simulator",
    "StopRequest": "llmbatch.runtime.cancellation",
    "StoppedEarly": "llmbatch.errors",
    "StorageError": "llmbatch.errors",
    "explain": "llmbatch.jobs.explain",
    "map_dataset": "llmbatch.operators.ray.dataset",  # the only name that needs Ray
    "run": "llmbatch.jobs.job",
    "serve": "llmbatch.serving.serve",
    "simulate": "llmbatch.simulation.experiment",
}

__all__ = [
    "Advance",
    "DataError",
    "Forecast",
    "InputError",
    "JobError",
    "JobStopped",
    "LLMBatchError",
    "LLMOperator",
    "ModelError",
    "OtherCommandError",
    "ParameterError",
    "Progress",
    "Report",
    "SamplingParams",
    "SimulationReport",
    "StopRequest",
    "StoppedEarly",
    "StorageError",
    "__version__",
    "explain",
    "map_dataset",
    "run",
    "serve",
    "simulate",
]

watch_old_paths()
watch_libraries()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        moved = f"llmbatch.{name} is now llmbatch.{MOVED[name]}" if name in MOVED else None
        raise AttributeError(moved or f"module 'llmbatch' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

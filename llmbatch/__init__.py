"""llmbatch: run a large language model over a dataset, for throughput.

    import llmbatch
    report = llmbatch.run("questions.parquet", "answers", model="Qwen/Qwen3-8B", prompt="question", chat=True)

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmbatch._version import __version__

if TYPE_CHECKING:
    from llmbatch.errors import DataError, InputError, JobError, LLMBatchError, ModelError, ParameterError
    from llmbatch.inference.report import Report
    from llmbatch.jobs.job import explain, run
    from llmbatch.operators.llm import LLMOperator
    from llmbatch.preprocess.sampling_params import SamplingParams

_HOME = {
    "DataError": "llmbatch.errors",
    "InputError": "llmbatch.errors",
    "JobError": "llmbatch.errors",
    "LLMBatchError": "llmbatch.errors",
    "LLMOperator": "llmbatch.operators.llm",
    "ModelError": "llmbatch.errors",
    "ParameterError": "llmbatch.errors",
    "Report": "llmbatch.inference.report",
    "SamplingParams": "llmbatch.preprocess.sampling_params",
    "explain": "llmbatch.jobs.job",
    "run": "llmbatch.jobs.job",
}

__all__ = [
    "DataError",
    "InputError",
    "JobError",
    "LLMBatchError",
    "LLMOperator",
    "ModelError",
    "ParameterError",
    "Report",
    "SamplingParams",
    "__version__",
    "explain",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'llmbatch' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

"""What `run` is asked beside the options of `LLMOperator`: how a job is resumed, read and written.

This module imports nothing heavy. Annotations are evaluated here, unlike elsewhere, since the command line reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from llmbatch.arguments import finite, flag, one_of, refusal, text, whole
from llmbatch.choices import (
    CHANGED_ROWS,
    COMPRESSIONS,
    OUTPUT_FORMATS,
    PLANS,
    ChangedRows,
    Compression,
    Keyword,
    OutputFormat,
    PlanName,
)
from llmbatch.inference.keywords import OptionArgs


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How a job is resumed, read and written. Raises ParameterError."""

    id_column: str | None = None
    restart: bool = False
    overwrite: bool = False
    retry_errors: bool = False
    changed_rows: ChangedRows = "refuse"
    preserve_order: bool = True
    max_error_rate: float | None = None
    window_rows: int | None = None
    output_format: OutputFormat = "auto"
    compression: Compression = "auto"
    plan: PlanName = "given"

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name in ("restart", "overwrite", "retry_errors", "preserve_order"):
            set_(self, name, flag(name, getattr(self, name)))
        if self.id_column is not None:
            text("id_column", self.id_column)
        if self.max_error_rate is not None:
            set_(self, "max_error_rate", finite("max_error_rate", self.max_error_rate))
            if not 0 <= self.max_error_rate <= 1:
                raise refusal("max_error_rate", "lie in [0, 1]", self.max_error_rate)
        if self.window_rows is not None:
            set_(self, "window_rows", whole("window_rows", self.window_rows, 1))
        one_of("changed_rows", self.changed_rows, CHANGED_ROWS)
        one_of("output_format", self.output_format, OUTPUT_FORMATS)
        one_of("compression", self.compression, COMPRESSIONS)
        one_of("plan", self.plan, PLANS)

    @property
    def starts_over(self) -> bool:
        """Whether nothing of an earlier run is gone on with."""
        return self.restart or self.overwrite


class InputArgs(TypedDict, total=False):
    """How files are opened."""

    storage_options: Annotated[
        Mapping[str, Any] | None, Keyword("passed to fsspec for input and output", metavar="JSON")
    ]


class JobArgs(TypedDict, total=False):
    """The fields of `JobOptions`."""

    id_column: Annotated[
        str | None,
        Keyword(
            "a column of unique values: rows are known by them, also when the input has changed",
            means="by position",
            metavar="COL",
        ),
    ]
    restart: Annotated[bool, Keyword("start over, whatever an earlier run left", JobOptions.restart)]
    overwrite: Annotated[
        bool, Keyword("start over, and replace Parquet files of others at OUT too", JobOptions.overwrite)
    ]
    retry_errors: Annotated[bool, Keyword("answer the rows again that failed", JobOptions.retry_errors)]
    changed_rows: Annotated[
        ChangedRows,
        Keyword(
            "what becomes of answered rows that read otherwise now: refuse the job, or answer them again",
            JobOptions.changed_rows,
        ),
    ]
    preserve_order: Annotated[
        bool,
        Keyword(
            "keep the input's order; parts appear when all rows are answered",
            JobOptions.preserve_order,
            off="publish each part as soon as it is full, its rows in the order in which they finish",
        ),
    ]
    max_error_rate: Annotated[
        float | None,
        Keyword("end the job when a larger share of its rows has failed, 0 to 1", means="1", metavar="R"),
    ]
    window_rows: Annotated[
        int | None, Keyword("rows that are read and planned together", means="by memory", metavar="N")
    ]
    output_format: Annotated[
        OutputFormat,
        Keyword(
            "what is written: lines of OpenAI's batch output (a .parquet file has them as columns), or the input's "
            "columns and the answers'",
            JobOptions.output_format,
            "openai for an OpenAI batch that is written as JSONL",
        ),
    ]
    compression: Annotated[Compression, Keyword("the compression of Parquet output", JobOptions.compression, "zstd")]
    plan: Annotated[
        PlanName,
        Keyword(
            "which of the GPUs that are here share the model, and where KV lies: as other options say, or by a search "
            "with a sample of the rows",
            JobOptions.plan,
        ),
    ]


class SearchArgs(TypedDict, total=False):
    """Devices elsewhere that `explain` lays the model on."""

    search: Annotated[
        bool,
        Keyword("find the best split of devices that are offered: how many share the model, how many copies", False),
    ]
    devices: Annotated[
        Mapping[str, int] | None, Keyword("the devices offered, as in h100:8,l40s:8", metavar="NAME:N,...")
    ]
    price: Annotated[
        Mapping[str, float] | None,
        Keyword("dollars an hour of one of each kind; the best split is the cheapest then", metavar="NAME=D,..."),
    ]
    device_host: Annotated[
        Mapping[str, float] | None,
        Keyword(
            "what the devices of a kind share: memory in bytes, bandwidth in bytes/s, compute in FLOP/s, as in "
            "memory=1TB,bandwidth=200GB,compute=1e12; KV may lie there",
            means="room for weights alone",
            metavar="memory=SIZE,...",
        ),
    ]


class DatasetArgs(OptionArgs, InputArgs, total=False):
    """The keywords of all that reads a dataset."""


class ExplainArgs(DatasetArgs, SearchArgs, total=False):
    """The keywords of `explain`."""


class RunArgs(DatasetArgs, JobArgs, total=False):
    """The keywords of `run` that are options."""

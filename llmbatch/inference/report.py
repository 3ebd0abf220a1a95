"""What a job did, as frozen figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from llmbatch.figures import Figures


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Sums over answered rows, which add up."""

    rows: int = 0
    errors: int = 0
    duplicates: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    unique_tokens: int = 0  # prompt tokens, if within a window each distinct prefix token were computed once

    def __add__(self, other: RowCounts) -> RowCounts:
        """Return the sums over both."""
        return RowCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True, kw_only=True)
class Report(Figures):
    """Figures of a finished job. Tokens are counted over all rows that ran, cached and duplicate ones included."""

    rows: int
    errors: int  # rows without an answer
    duplicates: int  # rows answered by an equal row
    input_tokens: int
    cached_tokens: int  # prompt tokens that were not computed, recomputation after preemption left out
    output_tokens: int
    load_seconds: float  # importing libraries and loading weights
    seconds: float  # everything else
    prefix_sharing: float  # cached tokens over input tokens
    prefix_sharing_optimal: float  # the same if a window computed each distinct prefix token once, or what was reached
    preemptions: int
    steps: int
    order: str
    reason: str  # why this order, in a sentence
    order_gain: float | None  # simulated seconds in the input's order over this order's; null for large jobs
    model: str
    dtype: str
    kv_memory: int  # bytes of the page pool
    engine_deaths: int = 0  # engines that were replaced
    rows_resumed: int = 0  # rows found answered by an earlier run; time and steps are this run's
    first_error: str | None = None  # that this run saw, with its row
    notes: tuple[str, ...] = ()
    output: str | None = None
    finished_before: bool = False  # the output was there already; the figures are that job's

    @classmethod
    def of(cls, tally: RowCounts, **others: Any) -> Report:
        """Return the report of what adds up to `tally`; `others` are the other fields."""
        sums = asdict(tally)
        unique, inputs = sums.pop("unique_tokens"), tally.input_tokens
        sharing = tally.cached_tokens / inputs if inputs else 0.0
        return cls(
            **sums,
            prefix_sharing=sharing,
            prefix_sharing_optimal=max(sharing, 1 - unique / inputs) if inputs else 0.0,  # pages outlive windows
            **others,
        )

    @property
    def tokens_per_second(self) -> float:
        """Input and output tokens over `seconds`."""
        return (self.input_tokens + self.output_tokens) / self.seconds if self.seconds > 0 else 0.0

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> Report:
        """Rebuild a report from `to_dict()`; ignore unknown keys."""
        known = {field.name: figures[field.name] for field in fields(cls) if field.name in figures}
        return cls(**{**known, "notes": tuple(figures["notes"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {**asdict(self), "notes": list(self.notes), "tokens_per_second": self.tokens_per_second}

    def _in_words(self) -> list[tuple[str, str]]:
        """Say each figure in words, by its name."""
        errors, duplicates, resumed = f"{self.errors:,}", f"{self.duplicates:,}", f"{self.rows_resumed:,}"
        said = [
            ("rows", f"{self.rows:,} ({errors} errors, {duplicates} duplicates, {resumed} found answered)"),
            *([] if self.first_error is None else [("first error", self.first_error)]),
            ("tokens", f"{self.input_tokens:,} in, {self.output_tokens:,} out"),
            ("speed", f"{self.tokens_per_second:,.0f} tokens/s over {self.seconds:,.1f} s"),
            ("loading", f"{self.load_seconds:.1f} s before that"),
            ("prefix sharing", f"{self.prefix_sharing:.1%} of {self.prefix_sharing_optimal:.1%} possible"),
            ("order", f"{self.order}: {self.reason or 'No row was run.'}"),
        ]
        if self.order_gain is not None:
            gain = f"{self.order_gain:.2f} x over the input's order, simulated with these answers"
            said.append(("order bought", gain))
        if self.output is not None:
            said.append(("output", self.output))
        return [*said, *(("note", note) for note in self.notes)]


Report.__module__ = "llmbatch"  # which it is imported from

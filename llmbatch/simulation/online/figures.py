"""What a run by the clock is judged by: figures of two tables, a row a step and a row a request.

Nothing else goes into them, so that whoever has the tables can compute each figure again (docs/simulate.md).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class OnlineFigures:
    """What online requests got. Seconds; NaN where there were none."""

    requests: int
    ttft_p50: float  # from arrival to the first token
    ttft_p99: float
    ttft_max: float
    gap_p50: float  # between two tokens of a request, over all gaps
    gap_p99: float
    gap_p999: float
    gap_max: float
    normalised_latency: float  # mean over requests of (last token - arrival) / tokens of the answer
    ttft_attainment: float  # share of requests whose first token was in time
    tpot_attainment: float  # share whose mean gap was at most the target
    both_attainment: float

    @property
    def in_words(self) -> list[str]:
        """Say them for a person, where there were requests."""
        return [
            f"online           {self.requests:,} requests; both targets met by {self.both_attainment:.1%} "
            f"(first token {self.ttft_attainment:.1%}, gaps {self.tpot_attainment:.1%})",
            f"first token      p50 {self.ttft_p50:.3f} s, p99 {self.ttft_p99:.3f} s, at most {self.ttft_max:.3f} s",
            f"gaps             p50 {self.gap_p50 * 1e3:.1f} ms, p99 {self.gap_p99 * 1e3:.1f} ms, "
            f"p99.9 {self.gap_p999 * 1e3:.1f} ms, at most {self.gap_max * 1e3:.1f} ms",
            f"normalised       {self.normalised_latency * 1e3:.1f} ms a token of the answer",
        ]


@dataclass(frozen=True, kw_only=True)
class JobFigures:
    """What the job got, up to `seconds`."""

    rows: int
    rows_ended: int
    tokens_ended: int  # prompt and answer tokens of the rows that ended
    tokens_computed: int  # tokens computed for the job for the first time
    tokens_again: int  # tokens computed again
    seconds: float  # when its last row ended, or the run's duration if that came first


def online_figures(requests: pa.Table, ttft: float, tpot: float) -> OnlineFigures:
    """Judge the online requests of a table of requests by targets of a first token and of the mean gap."""
    table = requests.filter(pa.compute.equal(requests["kind"], "online"))
    arrival, first, last = (table[name].to_numpy() for name in ("arrival_s", "first_token_s", "last_token_s"))
    output = table["output_tokens"].to_numpy()
    waits = first - arrival
    gaps = table["gaps_s"].combine_chunks().flatten().to_numpy()
    mean_gaps = (last - first) / np.maximum(output - 1, 1)
    first_met, gap_met = waits <= ttft, mean_gaps <= tpot
    return OnlineFigures(
        requests=len(arrival),
        ttft_p50=_percentile(waits, 50),
        ttft_p99=_percentile(waits, 99),
        ttft_max=_percentile(waits, 100),
        gap_p50=_percentile(gaps, 50),
        gap_p99=_percentile(gaps, 99),
        gap_p999=_percentile(gaps, 99.9),
        gap_max=_percentile(gaps, 100),
        normalised_latency=_mean((last - arrival) / output),
        ttft_attainment=_mean(first_met),
        tpot_attainment=_mean(gap_met),
        both_attainment=_mean(first_met & gap_met),
    )


def job_figures(steps: pa.Table, requests: pa.Table, duration: float | None) -> JobFigures:
    """Judge the job of the tables, up to `duration` seconds."""
    table = requests.filter(pa.compute.equal(requests["kind"], "offline"))
    until = np.inf if duration is None else duration
    last = table["last_token_s"].to_numpy()
    ended = (table["generated_tokens"].to_numpy() == table["output_tokens"].to_numpy()) & (last <= until)
    end = steps["begin_s"].to_numpy() + steps["time_s"].to_numpy()
    columns = ("prefill_tokens", "decode_tokens", "online_tokens", "recomputed_tokens", "online_recomputed_tokens")
    prefill, decode, online, again, online_again = (int(steps[name].to_numpy()[end <= until].sum()) for name in columns)
    tokens = table["prompt_tokens"].to_numpy() + table["output_tokens"].to_numpy()
    seconds = float(last[ended].max(initial=0.0))
    return JobFigures(
        rows=len(last),
        rows_ended=int(ended.sum()),
        tokens_ended=int(tokens[ended].sum()),
        tokens_computed=prefill + decode - online - (again - online_again),
        tokens_again=again - online_again,
        seconds=seconds if duration is None or ended.all() else float(duration),
    )


def _percentile(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def _mean(values: NDArray[Any]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


@dataclass(frozen=True, kw_only=True)
class OnlineReport:
    """The figures of a run of online requests beside a job."""

    policy: str
    ttft: float  # targets, s
    tpot: float
    online: OnlineFigures
    job: JobFigures
    refused: int  # requests that can never fit
    steps: int
    preemptions: int
    yielded_pages: int
    run_seconds: float  # the end of the last step
    bound_seconds: float | None  # no schedule with steps of at most `tpot` ends the job sooner
    bound_share: float | None  # nor does more than this share of it by the duration
    predictor_error: float | None = None  # `ooco`: mean relative error of its roofline after fitting
    took: float = 0.0  # real seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values; null where there is no number."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def to_text(self) -> str:
        """Return the figures for a person."""
        online, job = self.online, self.job
        lines = [
            f"policy           {self.policy}; targets: first token {self.ttft:g} s, mean gap {self.tpot * 1e3:g} ms",
            *(online.in_words if online.requests else ["online           0 requests"]),
            f"job              {job.rows_ended:,} of {job.rows:,} rows in {job.seconds:,.1f} s, "
            f"{job.tokens_computed:,} tokens and {job.tokens_again:,} again",
            f"steps            {self.steps:,} in {self.run_seconds:,.1f} s, {self.preemptions:,} preemptions, "
            f"{self.yielded_pages:,} pages given back, {self.refused:,} requests that can never fit",
        ]
        if self.bound_seconds == math.inf:
            lines.append(f"bound            none: no step is as short as {self.tpot * 1e3:g} ms")
        elif self.bound_seconds is not None:
            lines.append(
                f"bound            {self.bound_seconds:,.1f} s: no steps of at most {self.tpot * 1e3:g} ms end the job "
                f"sooner; x {job.seconds / self.bound_seconds:.3f} here"
            )
        if self.bound_share is not None:
            lines.append(f"bound            {self.bound_share:.1%} of the job at most in that time")
        if self.predictor_error is not None:
            lines.append(f"predictor        {self.predictor_error:.1%} off in the mean")
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value

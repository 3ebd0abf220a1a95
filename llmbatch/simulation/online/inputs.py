"""The requests of a run: online ones and when they arrive, and the rows of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel
from llmbatch.simulation.mix_draws import draw_mix, known_before
from llmbatch.simulation.mixes import parse_mix
from llmbatch.simulation.online.arrivals import drawn, read_arrivals, scaled, uniform
from llmbatch.simulation.online.lengths import drawn_trace, is_drawn
from llmbatch.simulation.online.options import OnlineOptions
from llmbatch.simulation.options import MIX_REQUESTS
from llmbatch.simulation.traces import Trace, put_together, read_traces


@dataclass(frozen=True, slots=True)
class Arriving:
    """Requests, and when they arrive, ascending: columns of one length."""

    trace: Trace
    arrival: NDArray[np.float64]  # s
    found: NDArray[np.int32]  # prompt tokens that an earlier one computes

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival)

    @classmethod
    def of_job(cls, trace: Trace, rate: float | None) -> Arriving:
        """Let the rows of a job arrive, `rate` a second, or all at once."""
        tree = trace.tree()
        found = known_before(tree.rows, tree.lcp, np.arange(len(trace), dtype=np.int32))
        found = np.minimum(found, trace.prompt_lengths - 1)  # its last token is computed by each
        return cls(trace, np.zeros(len(trace)) if rate is None else uniform(rate, len(trace)), found)

    @property
    def prompt(self) -> NDArray[np.int32]:
        """Prompt tokens."""
        return self.trace.prompt_lengths

    @property
    def output(self) -> NDArray[np.int32]:
        """Tokens of the answers."""
        return self.trace.output_lengths

    def that_fit(self, capacity: int) -> Arriving:
        """Select the requests that fit a pool of so many tokens alone."""
        rows = np.flatnonzero(self.prompt.astype(np.int64) + self.output <= capacity)
        return Arriving(self.trace.take(rows), self.arrival[rows], self.found[rows])


def online_requests(name: str, options: OnlineOptions) -> Arriving:
    """Read or draw the online requests, and when they arrive. Raises InputError."""
    rng = np.random.default_rng((options.seed, 0))
    if options.arrivals == "trace":
        if is_drawn(name):
            raise ParameterError(f"arrivals (--arrivals) must be poisson or gamma for {name}, which has no times")
        trace = _of_file(name, options)
        rows, arrival = scaled(read_arrivals(Path(name)), options.rate, rng)
        if options.duration is not None:
            rows, arrival = rows[arrival < options.duration], arrival[arrival < options.duration]
    else:
        assert options.per_second is not None, "options are checked"
        assert options.duration is not None, "options are checked"
        variation = 1.0 if options.arrivals == "poisson" else options.burstiness
        arrival = drawn(options.per_second * options.rate, options.duration, rng, variation=variation)
        trace = drawn_trace(name, max(1, len(arrival)), rng) if is_drawn(name) else _of_file(name, options)
        rows = rng.integers(0, len(trace), len(arrival))
    return Arriving(trace.take(rows).cut(np.zeros(len(rows), np.int64)), arrival, np.zeros(len(rows), np.int32))


def _of_file(name: str, options: OnlineOptions) -> Trace:
    (trace,) = read_traces([name], hash_block=options.hash_block)
    return trace


def job_of(names: Sequence[str], options: OnlineOptions, cost: CostModel) -> Arriving:
    """Read or draw the rows of the job, in the order of its input; none without a name. Raises InputError."""
    distributions = [name for name in names if is_drawn(name)]
    if not names:
        trace = drawn_trace("uniform:1-1,1-1", 1, np.random.default_rng(0)).take(np.empty(0, np.int64))
    elif distributions:
        if len(names) > 1 or options.requests is None or options.mix is not None:
            raise ParameterError(
                f"a distribution must stand alone and have requests (--requests N), got {', '.join(names)}"
            )
        trace = drawn_trace(distributions[0], options.requests, np.random.default_rng((options.seed, 1)))
    else:
        files = read_traces(names, hash_block=options.hash_block)
        if options.mix is not None:
            trace = draw_mix(files, parse_mix(options.mix), options.requests or MIX_REQUESTS, cost, options.seed).trace
        else:
            trace = put_together(files)
            trace = trace if options.requests is None else trace.first(options.requests)
    return Arriving.of_job(trace, options.offline_rate)

"""What a run of online requests beside a job is asked, checked before anything is read.

This module imports nothing heavy. Annotations are evaluated here, unlike elsewhere, since the command line reads them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict, get_args

from llmbatch.arguments import finite, one_of, refusal, text, whole
from llmbatch.choices import MOST_CARDS, Keyword, Law
from llmbatch.simulation.options import MIX_REQUESTS, PAGE_SIZE, Knowledge

OnlinePolicy = Literal["fcfs", "round-robin", "priority", "bros", "ooco", "slack"]
ArrivalKind = Literal["trace", "poisson", "gamma"]
POOLS = "strict=1,relaxed=1"  # OOCO's two engines
_MOST = 1 << 30
_COUNTS = ("requests", "step_tokens", "max_running", "outstanding", "page_size", "hash_block", "tensor_parallel")
OF_JOB = ("mix", "requests", "offline_rate", "outstanding")
_POSITIVE = ("ttft", "tpot", "rate", "per_second", "burstiness", "duration", "offline_rate", "kv_memory")


@dataclass(frozen=True, kw_only=True)
class OnlineOptions:
    """Online requests, a job, a policy with its targets, and a model on a device. Raises ParameterError."""

    policy: OnlinePolicy = "fcfs"
    ttft: float = 1.0  # s
    tpot: float = 0.05
    rate: float = 1.0  # times the trace's own
    arrivals: ArrivalKind = "trace"
    per_second: float | None = None
    burstiness: float = 2.0
    duration: float | None = None  # s
    mix: str | None = None
    requests: int | None = None  # of the job
    offline_rate: float | None = None  # rows a second
    outstanding: int | None = None
    step_tokens: int = 2048
    max_running: int = 256
    pools: str | None = None
    lengths: Knowledge = "sampled"
    model_shape: str = "llama-3-8b"
    hardware: str = "a100-80gb"
    kv_memory: float | None = None  # bytes
    page_size: int = PAGE_SIZE
    hash_block: int = 16
    tensor_parallel: int = 1
    law: Law = "bytes"
    overlap_exponent: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        one_of("policy", self.policy, get_args(OnlinePolicy))
        one_of("arrivals", self.arrivals, get_args(ArrivalKind))
        one_of("law", self.law, get_args(Law))
        one_of("lengths", self.lengths, get_args(Knowledge))
        for name in _COUNTS:
            if getattr(self, name) is not None:
                set_(self, name, whole(name, getattr(self, name), 1, _MOST))
        whole("tensor_parallel", self.tensor_parallel, 1, MOST_CARDS)
        set_(self, "seed", whole("seed", self.seed, 0))
        if self.pools is not None and (self.pools != POOLS or self.policy != "ooco"):
            raise refusal("pools", f"be {POOLS}, for policy ooco", self.pools)
        for name in ("offline_rate", "outstanding") if self.policy == "slack" else ():
            if getattr(self, name) is not None:
                raise refusal(name, "be left out for policy slack, which has all rows at once", getattr(self, name))
        for name in ("mix", "model_shape", "hardware"):
            if getattr(self, name) is not None:
                text(name, getattr(self, name))
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                set_(self, name, finite(name, getattr(self, name)))
                if getattr(self, name) <= 0:
                    raise refusal(name, "be above 0", getattr(self, name))
        set_(self, "overlap_exponent", finite("overlap_exponent", self.overlap_exponent))
        if self.overlap_exponent < 1:
            raise refusal("overlap_exponent", "be at least 1", self.overlap_exponent)
        if self.arrivals != "trace" and self.per_second is None:
            raise refusal("per_second", f"be given for arrivals {self.arrivals} (--per-second Q)", None)
        if self.arrivals != "trace" and self.duration is None:
            raise refusal("duration", f"be given for arrivals {self.arrivals} (--duration S)", None)
        if self.arrivals == "trace" and self.per_second is not None:
            rule = "be left out for arrivals trace, whose times are the trace's own (--arrivals poisson draws some)"
            raise refusal("per_second", rule, self.per_second)
        if self.arrivals != "gamma" and self.burstiness != type(self).burstiness:
            raise refusal("burstiness", "be left out without arrivals gamma (--arrivals gamma)", self.burstiness)


_DEFAULT = OnlineOptions()


class OnlineArgs(TypedDict, total=False):
    """The keywords of `simulate_online`: the fields of `OnlineOptions`, and where logs are written."""

    offline: Annotated[
        Sequence[str] | None,
        Keyword("the job: traces, or a distribution of lengths (docs/simulate.md)", metavar="TRACE"),
    ]
    policy: Annotated[OnlinePolicy, Keyword("who is run when", _DEFAULT.policy)]
    ttft: Annotated[float, Keyword("target of a first token", _DEFAULT.ttft, metavar="SECONDS")]
    tpot: Annotated[float, Keyword("target between tokens", _DEFAULT.tpot, metavar="SECONDS")]
    rate: Annotated[float, Keyword("arrivals, times the trace's own", _DEFAULT.rate, metavar="X")]
    arrivals: Annotated[
        ArrivalKind, Keyword("when online requests arrive: as in the trace, or by chance", _DEFAULT.arrivals)
    ]
    per_second: Annotated[float | None, Keyword("arrivals a second, by chance", metavar="Q")]
    burstiness: Annotated[
        float, Keyword("coefficient of variation of gamma arrivals' gaps", _DEFAULT.burstiness, metavar="V")
    ]
    duration: Annotated[
        float | None,
        Keyword("time in which online requests arrive and the job counts", means="all, to the end", metavar="SECONDS"),
    ]
    mix: Annotated[str | None, Keyword("draw the job: table2-1 to table2-4, wide-1, or DENSITY,SHARING", metavar="MIX")]
    requests: Annotated[
        int | None, Keyword("rows of the job", means=f"{MIX_REQUESTS:,} of a mix, else all", metavar="N")
    ]
    offline_rate: Annotated[float | None, Keyword("rows of the job a second", means="all at once", metavar="Q")]
    outstanding: Annotated[
        int | None, Keyword("most rows of the job that have arrived and not ended", means="all", metavar="N")
    ]
    step_tokens: Annotated[
        int, Keyword("most tokens of a step of fcfs, round-robin and priority", _DEFAULT.step_tokens, metavar="N")
    ]
    max_running: Annotated[
        int, Keyword("most sequences that run, but for bros and slack", _DEFAULT.max_running, metavar="N")
    ]
    pools: Annotated[str | None, Keyword(f"ooco as two engines: {POOLS}", means="one engine for both", metavar="POOLS")]
    lengths: Annotated[Knowledge, Keyword("whether slack is told the lengths of the job's answers", _DEFAULT.lengths)]
    model_shape: Annotated[
        str, Keyword("a known shape, or a folder with a config.json", _DEFAULT.model_shape, metavar="M")
    ]
    hardware: Annotated[str, Keyword("a known GPU", _DEFAULT.hardware, metavar="H")]
    kv_memory: Annotated[
        float | None, Keyword("memory for KV pages", means="the card's, less weights and 4 GB", metavar="BYTES")
    ]
    page_size: Annotated[int, Keyword("tokens in a KV page", _DEFAULT.page_size, metavar="N")]
    hash_block: Annotated[int, Keyword("tokens in a block of hash_ids", _DEFAULT.hash_block, metavar="N")]
    tensor_parallel: Annotated[int, Keyword("cards that act as one", _DEFAULT.tensor_parallel, metavar="N")]
    law: Annotated[
        Law, Keyword("paper: the reading of weights is a least time of compute; bytes: it is memory time", _DEFAULT.law)
    ]
    overlap_exponent: Annotated[
        float, Keyword("how well compute and memory overlap, from 1", _DEFAULT.overlap_exponent, metavar="E")
    ]
    seed: Annotated[int, Keyword("the seed of draws", _DEFAULT.seed, metavar="S")]
    steps_out: Annotated[str | os.PathLike[str] | None, Keyword("write a Parquet file with a row a step", metavar="F")]
    requests_out: Annotated[
        str | os.PathLike[str] | None, Keyword("write a Parquet file with a row a request", metavar="F")
    ]

"""What a simulation is asked, checked before anything is read.

This module imports nothing heavy. Annotations are evaluated here, unlike elsewhere, since the command line reads them.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict, get_args

from llmbatch.arguments import finite, flag, one_of, refusal, text, whole
from llmbatch.choices import MOST_CARDS, POLICIES, Keyword, Law, Policy

Knowledge = Literal["known", "sampled"]
PAGE_SIZE = 16  # tokens
_COUNTS = ("requests", "max_tokens", "step_tokens", "page_size", "hash_block", "tensor_parallel", "data_parallel")
_MAY_BE_LEFT = ("requests", "max_tokens", "step_tokens")
MIX_REQUESTS = 100_000  # drawn of a mix, where nothing else is asked


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """A model on a device, a policy, and what is drawn of the traces. Raises ParameterError."""

    mix: str | None = None
    requests: int | None = None
    max_tokens: int | None = None  # that users give: longer answers are cut; None: as far as pool and context reach
    order: Policy = "blend"
    step_tokens: int | None = None
    model_shape: str = "llama-3-8b"
    hardware: str = "a100-80gb"
    kv_memory: float | None = None  # bytes
    page_size: int = PAGE_SIZE
    hash_block: int = 16
    tensor_parallel: int = 1
    data_parallel: int = 1
    lengths: Knowledge = "sampled"
    sample_fraction: float = 0.01
    law: Law = "paper"
    overlap_exponent: float = 4.0
    cascade: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_LEFT:
                set_(self, name, whole(name, value, 1))
        whole("tensor_parallel", self.tensor_parallel, 1, MOST_CARDS)
        set_(self, "seed", whole("seed", self.seed, 0))
        set_(self, "cascade", flag("cascade", self.cascade))
        for name, known in (("order", POLICIES), ("lengths", get_args(Knowledge)), ("law", get_args(Law))):
            one_of(name, getattr(self, name), known)
        for name in ("mix", "model_shape", "hardware"):
            if getattr(self, name) is not None:
                text(name, getattr(self, name))
        for name in ("kv_memory", "sample_fraction", "overlap_exponent"):
            if getattr(self, name) is not None:
                set_(self, name, finite(name, getattr(self, name)))
        if not 0 < self.sample_fraction <= 1:
            raise refusal("sample_fraction", "lie in (0, 1]", self.sample_fraction)
        if self.overlap_exponent < 1:
            raise refusal("overlap_exponent", "be at least 1", self.overlap_exponent)


_DEFAULT = SimulationOptions()


class SimulationArgs(TypedDict, total=False):
    """The keywords of `simulate`: the fields of `SimulationOptions`, and where logs are written."""

    mix: Annotated[
        str | None,
        Keyword("table2-1 to table2-4, wide-1, or DENSITY,SHARING; needs three traces", metavar="MIX"),
    ]
    requests: Annotated[
        int | None,
        Keyword(
            "draws of a mix, or the first rows of the traces", means=f"{MIX_REQUESTS:,} of a mix, else all", metavar="N"
        ),
    ]
    max_tokens: Annotated[
        int | None,
        Keyword("the cap that users give: longer answers are cut", means="as the pool allows", metavar="N"),
    ]
    order: Annotated[Policy, Keyword("the order in which requests are run", _DEFAULT.order, aliases=("--policy",))]
    step_tokens: Annotated[
        int | None, Keyword("the most tokens of a step", means="2048; blend decides in closed loop", metavar="N")
    ]
    model_shape: Annotated[
        str, Keyword("a known shape, or a folder with a config.json", _DEFAULT.model_shape, metavar="M")
    ]
    hardware: Annotated[str, Keyword("a known GPU", _DEFAULT.hardware, metavar="H")]
    kv_memory: Annotated[
        float | None,
        Keyword("memory for KV pages", means="the card's, less weights and 4 GB", metavar="BYTES"),
    ]
    page_size: Annotated[int, Keyword("tokens in a KV page", _DEFAULT.page_size, metavar="N")]
    hash_block: Annotated[int, Keyword("tokens in a block of hash_ids", _DEFAULT.hash_block, metavar="N")]
    tensor_parallel: Annotated[int, Keyword("cards that act as one", _DEFAULT.tensor_parallel, metavar="N")]
    data_parallel: Annotated[int, Keyword("replicas that share the requests", _DEFAULT.data_parallel, metavar="N")]
    lengths: Annotated[Knowledge, Keyword("whether the scheduler is told the answers' lengths", _DEFAULT.lengths)]
    sample_fraction: Annotated[
        float, Keyword("requests that run first to learn lengths", _DEFAULT.sample_fraction, metavar="F")
    ]
    law: Annotated[
        Law, Keyword("paper: the reading of weights is a least time of compute; bytes: it is memory time", _DEFAULT.law)
    ]
    overlap_exponent: Annotated[
        float,
        Keyword("how well compute and memory overlap, from 1", _DEFAULT.overlap_exponent, metavar="E"),
    ]
    cascade: Annotated[bool, Keyword("decodes read a long prefix that many share once a step", _DEFAULT.cascade)]
    seed: Annotated[int, Keyword("the seed of draws, samples and random orders", _DEFAULT.seed, metavar="S")]
    steps_out: Annotated[str | os.PathLike[str] | None, Keyword("write a Parquet file with a row a step", metavar="F")]
    requests_out: Annotated[
        str | os.PathLike[str] | None, Keyword("write a Parquet file with a row a request", metavar="F")
    ]

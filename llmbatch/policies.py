"""The orders by name, and the rule of each order that is consumed from one end.

A new order is a name in `Policy` and a rule in `ONE_ENDED`, both here: the options, the command line, the planner and
the simulator read them from this module. It imports no NumPy, so that `llmbatch --help` may list the names at once.
`blend` and `dual-scan` are consumed from both ends and are planned in `llmbatch.planning.plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Policy = Literal["blend", "dual-scan", "dfs", "sort", "density", "random", "input"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


class OrderableRows(Protocol):
    """What a policy knows of a shard's rows: columns by row, and ways to walk them, each an int32 [n] of rows."""

    @property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """The length of each prompt."""

    @property
    def expected_tokens(self) -> NDArray[np.float64]:
        """The mean expected length of each answer; a rule that reads it sets `needs_lengths`."""

    @property
    def place(self) -> NDArray[np.int32]:
        """Where each row stands in the input."""

    def in_input_order(self) -> NDArray[np.int32]:
        """Keep the input's order."""

    def at_random(self) -> NDArray[np.int32]:
        """Shuffle by the job's seed."""

    def by_prompt(self) -> NDArray[np.int32]:
        """Sort by the prompts' tokens."""

    def by_density(self) -> NDArray[np.int32]:
        """Walk the prefix tree depth first, subtrees of most compute for their memory time first."""

    def depth_first(self, key: NDArray[Any]) -> NDArray[np.int32]:
        """Walk the prefix tree depth first, subtrees by the smallest `key` (by row) below them, ascending."""


class OrderRule(NamedTuple):
    """How a policy that is consumed from one end orders rows."""

    order: Callable[[OrderableRows], NDArray[np.int32]]
    needs_lengths: bool = False  # the order is made anew when more answers are known


ONE_ENDED: dict[Policy, OrderRule] = {
    "dfs": OrderRule(lambda rows: rows.depth_first(rows.place)),
    "sort": OrderRule(lambda rows: rows.by_prompt()),
    "density": OrderRule(lambda rows: rows.by_density(), needs_lengths=True),
    "random": OrderRule(lambda rows: rows.at_random()),
    "input": OrderRule(lambda rows: rows.in_input_order()),
}

"""The policies by name, each ready to decide."""

from __future__ import annotations

from dataclasses import dataclass

from llmbatch.compilation.records import records
from llmbatch.perf_model.cost import CostModel
from llmbatch.simulation.online import bros, fcfs, ooco, priority, round_robin
from llmbatch.simulation.online.clock import Decide
from llmbatch.simulation.online.options import OnlinePolicy
from llmbatch.simulation.online.roofline import fitted
from llmbatch.simulation.online.run_state import RunState


@dataclass(frozen=True, slots=True)
class ReadyPolicy:
    """A policy: how it decides, whether it tells online requests from the job, how far its predictions are off."""

    decide: Decide
    lanes: int = 2
    predictor_error: float | None = None


def find_policy(name: OnlinePolicy, cost: CostModel) -> ReadyPolicy:
    """Make the policy of that name ready for a model on a device. Raises ParameterError."""
    if name == "ooco":
        fit, batch = fitted(cost), records(ooco.MixedBatch)

        def decide(state: RunState) -> None:
            ooco.decide(state, fit.roofline, batch)

        return ReadyPolicy(decide, predictor_error=fit.error)
    decides: dict[str, ReadyPolicy] = {
        "fcfs": ReadyPolicy(fcfs.decide, lanes=1),
        "round-robin": ReadyPolicy(round_robin.decide),
        "priority": ReadyPolicy(priority.decide),
        "bros": ReadyPolicy(bros.decide),
    }
    return decides[name]

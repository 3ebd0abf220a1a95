"""The split of GPUs at hand that a job takes: how many share its model, and where its keys and values lie.

`explain --search` weighs devices that are offered. A job has the devices that are there, and may take less of what is
searched: each device of a copy needs whole heads, and some options allow no ranks, or no host that attends. Where
weights lie is not taken from here, since a job decides it by the memory that it finds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeVar

from llmbatch.engine.config import EngineConfig
from llmbatch.engine.model.outline import Described, shape_on_gpus
from llmbatch.errors import ParameterError
from llmbatch.perf_model.hardware import Hardware
from llmbatch.planning.workload import Scheduling
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.simulation.search import search_requests
from llmbatch.simulation.splits import Offer, splits_of

MOST_PLANNED: Final = 2_000  # rows that are read for a plan

Config = TypeVar("Config", bound=EngineConfig)


def take_best_split(
    config: Config,
    model: Described,
    requests: RequestBatch,
    offer: Offer,
    scheduling: Scheduling,
    *,
    host: Hardware | None,
    times: float,
) -> tuple[Config, str]:
    """Return the config with the best split of the devices of an offer, and a sentence that says which one it is.

    The job has `times` as many rows as there are requests. Without a `host`, keys and values stay on the devices.
    Raises ParameterError where no split holds the model and its longest row.
    """
    shape = shape_on_gpus(model, config.dtype, config.kv_cache_dtype)
    allowed = tuple(devices for devices in offer.sharing() if _allows(config, tensor_parallel=devices))
    attends = config.host_may_attend and _allows(config, kv="host")
    splits = splits_of([replace(offer, groups=allowed)], shape, host if attends else None)
    best, *others = search_requests(requests, splits, scheduling, times=times)
    then = f"; the next best is {others[0].in_words}" if others else ""
    taken = replace(config, tensor_parallel=best.tensor_parallel, kv=best.kv)
    return taken, f"the plan is {best.in_words}{then}"


def _allows(config: EngineConfig, **given: Any) -> bool:
    try:
        replace(config, **given)
    except ParameterError:
        return False
    return True

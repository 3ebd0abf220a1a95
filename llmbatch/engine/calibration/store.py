"""Calibrations of a model on a device, the constants of each strategy, kept in files between jobs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from llmbatch._version import __version__
from llmbatch.engine.gpu.strategies import STRATEGIES, Strategy
from llmbatch.perf_model.cost import CostModel, Overlap
from llmbatch.perf_model.hardware import Hardware
from llmbatch.perf_model.shape import ModelShape

_NOISE: Final = 0.02  # what another strategy must gain over `sequential`
_FORMAT: Final = 2  # 1 had a third strategy, which was dropped


@dataclass(frozen=True, slots=True)
class FittedStrategy:
    """A measured strategy."""

    hardware: Hardware  # with its ceilings, and the efficiencies under them
    exponent: float  # of the overlap law
    cascade: bool  # decodes read a prefix that many of them share once a step
    share_near: float  # of the steps, that are predicted within 10 %
    largest_miss: float
    gain: float  # how many times as fast as `sequential` on blended steps

    def cost(self, shape: ModelShape) -> CostModel:
        """Build the cost model. Kernels run one after the other except where parts overlap, which is law `paper`."""
        return CostModel(shape, self.hardware, law="paper", overlap=Overlap(self.exponent), cascade=self.cascade)


@dataclass(frozen=True, slots=True)
class DeviceCalibration:
    """Every strategy, as measured."""

    fitted: Mapping[Strategy, FittedStrategy]

    @property
    def best(self) -> Strategy:
        """The strategy that runs blended steps fastest; `sequential` where none gains more than a clock's noise."""
        fastest = max(self.fitted, key=lambda name: self.fitted[name].gain)
        return fastest if self.fitted[fastest].gain > 1.0 + _NOISE else "sequential"

    @property
    def summary(self) -> str:
        """A comparison of the strategies, for a person."""
        others = (name for name in self.fitted if name != "sequential")
        return ", ".join(f"{name} is {self.fitted[name].gain:.2f} x as fast as sequential" for name in others)


class CalibrationStore:
    """The file of a calibration, in a folder of them.

    It is identified by device, model shape, requested `attention`, the ranks that share the model, and the libraries
    that compute.
    """

    def __init__(self, folder: Path, device: torch.device, shape: ModelShape, attention: str, ranks: int = 1) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._identity: dict[str, Any] = {
            "format": _FORMAT,
            "device": properties.name,
            "memory": properties.total_memory,
            "shape": asdict(shape),
            "attention": attention,
            "ranks": ranks,
            "versions": {"llmbatch": __version__, "torch": torch.__version__, "triton": version("triton")},
        }
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:16]
        name = properties.name.lower().replace(" ", "-")
        self.path: Path = folder / "calibrations" / f"{name}-{digest}.json"

    def find(self) -> DeviceCalibration | None:
        """Read the calibration, or return None if there is none that can be read."""
        try:
            kept = json.loads(self.path.read_text())
            return DeviceCalibration(
                {
                    name: FittedStrategy(**one | {"hardware": Hardware(**one["hardware"])})
                    for name, one in ((name, kept["fitted"][name]) for name in STRATEGIES)
                }
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, calibration: DeviceCalibration) -> None:
        """Write a calibration, whole or not at all. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fitted = {name: asdict(one) for name, one in calibration.fitted.items()}
        text = json.dumps({"of": self._identity, "fitted": fitted}, indent=1)
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        temporary.write_text(text + "\n")
        os.replace(temporary, self.path)

"""A device's multiprocessors are split by the driver, and what it cannot do is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmbatch.engine.gpu import strategies
from llmbatch.engine.gpu.sm_partition import NoGreenContexts, SplitDevice
from llmbatch.perf_model.work import Rates

DEVICE = torch.device("cuda", 0)


class Driver:
    """Stands where libcuda does, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self._fails = fails
        self.split: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == "cuDevSmResourceSplitByCount":
                assert arguments[0] is not arguments[3]
                self.split.append(arguments[-1].value)
            if name == "cuGreenCtxStreamCreate":
                arguments[0]._obj.value = 100 + len(self.split)
            return 801 if name == self._fails else 0

        return call


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 132 multiprocessors."""
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: (pointer, device))


@pytest.mark.usefixtures("card")
def test_a_share_is_split_off_once() -> None:
    driver = Driver()
    device = SplitDevice(DEVICE, driver)
    streams: Any = device.streams(0.25)
    assert streams == ((101, DEVICE), (101, DEVICE))
    assert device.streams(0.25) is streams
    assert device.streams(0.5) is not streams
    assert driver.split == [33, 66]


@pytest.mark.usefixtures("card")
def test_what_the_driver_refuses_is_named() -> None:
    device = SplitDevice(DEVICE, Driver("cuGreenCtxCreate"))
    with pytest.raises(NoGreenContexts) as caught:
        device.streams(0.5)
    assert str(caught.value) == "cuGreenCtxCreate failed with CUDA error 801"


@pytest.mark.usefixtures("card")
def test_what_the_driver_refuses_is_found_out_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "SplitDevice", lambda device: SplitDevice(device, Driver("cuGreenCtxCreate")))
    with pytest.raises(NoGreenContexts):
        strategies.make_execution("partitioned", Rates(1.0, 0.0, 0.0, 1.0, 0.0, False), DEVICE)


def test_a_driver_that_is_too_old_is_named() -> None:
    with pytest.raises(NoGreenContexts) as caught:
        SplitDevice(DEVICE, type("Old", (), {"cuDeviceGet": lambda *arguments: 0}))
    assert str(caught.value) == "the driver has no cuDeviceGetDevResource: a newer one is needed"

"""The device that a model runs on and the kernels for it, or the reason why it cannot be used."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import takewhile
from typing import Final

import torch

from llmbatch.arguments import refusal
from llmbatch.choices import KVPlace
from llmbatch.engine.config import EngineConfig
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.cpu.threads import launch_threads
from llmbatch.engine.model.outline import HOST_PAGE_SIZE
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.ranks.platforms import first_rank
from llmbatch.errors import ModelError

_CUDA: Final[str | None] = getattr(torch.version, "cuda", None)  # that torch was built for
_OLDEST: Final = (8, 0)  # compute capability: Ampere, the first with bfloat16


def find_platform(device: str, ranks: int = 1, kv: KVPlace = "device") -> Platform:
    """Find the platform of a `device`: "cpu", "cuda", "cuda:1", or "auto": a usable GPU if there is one.

    Threads are launched where a processor computes, as many as this process was told to take (`launch_threads`).
    With more than one of `ranks` it is that of the first, which has a share of a model. Where `kv` is host the host of
    a GPU attends. Raises ModelError if the device is missing, or cannot be used, and ParameterError where it has no
    room for so many ranks, or no host beside it.
    """
    found = _find_whole(device)
    if ranks == 1 and found.device.type == "cuda" and device in ("auto", "cuda"):
        found = replace(found, notes=(*found.notes, *_left_idle()))
    if kv == "host":
        found = _attending_on_host(found)
    return found if ranks == 1 else first_rank(found, ranks)


def gpus_alike(device: str) -> list[str]:
    """Name the GPUs that may share a model with that of `device`: itself, and those behind it while they are alike.

    There are none where the model would run on a processor. Raises ModelError if the device cannot be used.
    """
    found = _find_whole(device).device
    if found.type != "cuda":
        return []
    names = [torch.cuda.get_device_name(index) for index in range(found.index or 0, torch.cuda.device_count())]
    return list(takewhile(names[0].__eq__, names))


def check_kernels(platform: Platform, config: EngineConfig) -> None:
    """Raise ParameterError where a processor computes, and a GPU's way to do it was asked for by name."""
    for name, kept in (("attention", ("auto",)), ("overlap", ("auto", "sequential"))):
        value = getattr(config, name)
        if platform.is_host and value not in kept:
            raise refusal(name, f"be {' or '.join(kept)} on a processor, which has kernels of its own", value)


def _attending_on_host(platform: Platform) -> Platform:
    if platform.is_host:
        raise refusal("kv", "be device on a processor, whose memory is the host's (leave it out)", "host")
    launch_threads()
    return replace(platform, attends_on_host=True, page_size=HOST_PAGE_SIZE)


def _find_whole(device: str) -> Platform:
    if device == "cpu":
        return _processor()
    if device != "auto":
        reason = _unusable(device)
        if reason is not None:
            raise ModelError(f"device {device!r} cannot be used: {reason}; or take device='cpu' (--device cpu)")
        return _accelerated(device)
    if _CUDA is None or torch.cuda.device_count() == 0:
        return _processor()
    reason = _unusable("cuda")
    if reason is not None:
        return replace(
            _processor(), notes=(f"the model runs on the processor, since the GPU cannot be used: {reason}",)
        )
    return _accelerated("cuda")


def _processor() -> Platform:
    launch_threads()
    return HOST


def _accelerated(name: str) -> Platform:
    from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
    from llmbatch.engine.gpu.fp8_linear import Fp8Linear
    from llmbatch.engine.weights.host_layers import CopyStream

    device = torch.device("cuda", torch.device(name).index or 0)
    # Its memory holds thousands of short rows, and each that decodes shares the reading of the weights with the others.
    return Platform(device, GpuOps(device), PAGE_SIZE, max_running=2048, copies=CopyStream, to_fp8=Fp8Linear)


def _left_idle() -> tuple[str, ...]:
    """Say that there are GPUs that an engine leaves alone."""
    count = torch.cuda.device_count()
    if count == 1:
        return ()
    return (
        f"1 of the {count} GPUs that this process sees is used: --tensor-parallel shares a model between several, and "
        "map_dataset of llmbatch.operators.ray runs a copy on each",
    )


def _unusable(device: str) -> str | None:
    """Explain why a CUDA device cannot be used, and what to do about it; None if it can."""
    if _CUDA is None:
        return f"torch {torch.__version__} is built for the processor alone: install one that is built for CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:  # no driver, no card, or a driver that is too old for this CUDA
        reason = str(error).strip().split("\n")[0].rstrip(".")
        return f"{reason}: torch {torch.__version__} needs a driver for CUDA {_CUDA}"
    index = torch.device(device).index or 0
    if index >= count:
        return f"there are {count} GPUs here, numbered from 0: name one of them"
    capability = torch.cuda.get_device_capability(index)
    if capability < _OLDEST:
        name, (major, minor) = torch.cuda.get_device_name(index), capability
        return (
            f"{name} has compute capability {major}.{minor}, and the kernels need {_OLDEST[0]}.{_OLDEST[1]} (Ampere) "
            "or later: take a newer card"
        )
    if find_spec("triton") is None:
        return "its kernels are written in Triton, which is not installed: pip install triton"
    return None

"""What a model costs whose weights lie in the memory of the host, or on a disk, and KV there or on the device.

Weights in host memory come over the link while a step computes, layer after layer and expert after expert, so the
device keeps two layers of them, of experts two: one is used while the next one comes. A step reads each of them once,
and of experts those that its tokens are sent to. So the link is the floor of a step, and only more tokens a step lower
its share (BatchGen 5.4, 6.5).

How many tokens a step has is bound by KV. On the device it has what the two layers leave. In host memory there is room
for thousands of sequences: attention of decodes yields until all of them can pass a layer's experts together. The host
attends there, at the bandwidth of its memory, as BatchGen does with a single card. Prompts are attended on the device
(`with_host_weights`), or by the host as well, which is what the engine does (`with_host_kv`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import RESERVED, Hardware
from llmbatch.perf_model.shape import ModelShape

BUFFERS: Final = 2  # of weights on their way: one is used while the next one comes
_KEPT: Final = 0.05  # of the host's memory, for all else
_BESIDE: Final = 8.0  # exponent of products beside weights that come by a thread of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Memory beside a device, and the link to it."""

    memory: float  # bytes
    bandwidth: float  # bytes/s
    link: float  # bytes/s to the device
    efficiency: float = 0.85  # of both rates

    def __post_init__(self) -> None:
        for field in ("memory", "bandwidth", "link", "efficiency"):
            if not getattr(self, field) > 0:
                raise ParameterError(f"{field} of a host must be positive, got {getattr(self, field)}")


class Resident(NamedTuple):
    """The cost of a model whose weights lie in host memory, and the bytes that it leaves for KV."""

    cost: CostModel
    kv_memory: float


def _largest_part(shape: ModelShape) -> float:
    """Count the bytes of a layer without its experts, and one of these."""
    always = shape.weight_bytes - shape.expert_bytes
    return (always + shape.expert_bytes / max(shape.experts, 1)) / shape.layers


class WeightBlocks(NamedTuple):
    """The weights of a model as they are fetched."""

    number: int
    size: float  # bytes of each
    around: float  # bytes of what is always in memory


def blocks_of(shape: ModelShape, *, is_host: bool) -> WeightBlocks:
    """Divide weights into blocks that are fetched: layers, but experts on a processor that runs a mixture.

    A processor packs the head of a model, and keeps the embedding as well that it was tied to.
    """
    layers, beside = bytes_of_layers(shape), shape.bytes_around
    if is_host:
        beside += shape.head_bytes if beside < 2 * shape.head_bytes else 0.0
    if shape.expert_bytes and is_host:
        count = shape.experts * shape.layers
        return WeightBlocks(count, shape.expert_bytes / count, beside + layers - shape.expert_bytes)
    return WeightBlocks(shape.layers, layers / shape.layers, beside)


def bytes_of_layers(shape: ModelShape) -> float:
    """Return the bytes of the matrices of all layers, experts among them."""
    return shape.weight_bytes - shape.bytes_around


def with_streamed_weights(cost: CostModel, streamed_bytes: float, bytes_per_second: float) -> CostModel:
    """Return the cost of the same model, where so many bytes of its weights come from a disk or a host at each step.

    They come beside the computation: products hide the reading as far as they take as long.

    >>> from llmbatch.perf_model.hardware import Hardware
    >>> from llmbatch.perf_model.shape import find_shape
    >>> processor = Hardware(name="cpu", compute=1e11, bandwidth=2e10, memory=16e9)
    >>> cost = CostModel(find_shape("smollm2-135m"), processor, law="bytes")
    >>> round(cost.rates.weight_seconds, 3), round(with_streamed_weights(cost, 1e8, 1e9).rates.weight_seconds, 3)
    (0.016, 0.116)
    """
    hardware = cost.hardware
    seconds = cost.rates.weight_seconds + streamed_bytes / bytes_per_second
    efficiency = cost.shape.weight_bytes / seconds / hardware.bandwidth
    return replace(cost, hardware=replace(hardware, weight_efficiency=efficiency, weight_overlap=_BESIDE))


def with_host_kv(cost: CostModel, processor: Hardware) -> CostModel:
    """Return the cost of the same model on a device whose host attends, over KV in its memory.

    Products wait for attention, and attention for products. What rows share is read for each of them.

    >>> from llmbatch.perf_model.hardware import Hardware, find_hardware
    >>> from llmbatch.perf_model.shape import find_shape
    >>> cost = CostModel(find_shape("llama-3-8b"), find_hardware("a5000"), cascade=True)
    >>> processor = Hardware(name="cpu", compute=2e12, bandwidth=2e11, memory=1e12)
    >>> by_host = with_host_kv(cost, processor)
    >>> round(by_host.rates.seconds_per_kv_token / cost.rates.seconds_per_kv_token, 2)
    3.84
    >>> by_host.rates.weight_seconds == cost.rates.weight_seconds, by_host.rates.cascade
    (True, False)
    """
    device = cost.hardware
    slower = replace(
        device,
        bandwidth_efficiency=min(1.0, processor.bytes_per_second / device.bandwidth),
        weight_efficiency=device.weight_bytes_per_second / device.bandwidth,
        attention_efficiency=min(1.0, processor.attention_flops / device.compute),
    )
    return replace(cost, hardware=slower, overlap=SEQUENTIAL, cascade=False)


def with_host_weights(cost: CostModel, host: Host, *, kv: Literal["device", "host"]) -> Resident:
    """Return the cost of the same model with its weights in host memory, and the room for `kv`.

    Raises `ParameterError` where the host has no room for the weights, or the device none for what moves and for KV.

    >>> from llmbatch.perf_model.hardware import find_hardware
    >>> from llmbatch.perf_model.shape import find_shape
    >>> host = Host(memory=1e12, bandwidth=204.8e9, link=32e9)
    >>> card = CostModel(find_shape("mixtral-8x7b"), find_hardware("a5000"))
    >>> [round(with_host_weights(card, host, kv=kv).kv_memory / 1e9) for kv in ("device", "host")]
    [19, 857]
    >>> round(with_host_weights(card, host, kv="host").cost.rates.weight_seconds, 2)
    3.43
    """
    shape, hardware = cost.shape, cost.hardware
    left = host.memory * (1.0 - _KEPT) - shape.weight_bytes
    moving = 2 * _largest_part(shape)
    beside = hardware.memory - hardware.cards * RESERVED - moving
    if left <= 0.0:
        raise ParameterError(
            f"memory of a host must hold the weights, got {host.memory / 1e9:.0f} GB for "
            f"{shape.weight_bytes / 1e9:.0f}: take a host with more memory, or weights of fewer bytes"
        )
    if beside <= 0.0:
        raise ParameterError(
            f"memory of a device must hold two layers, of experts two, got {hardware.memory / 1e9:.0f} GB for "
            f"{moving / 1e9:.1f} and {hardware.cards * RESERVED / 1e9:.0f} of its own: take a larger device, or "
            "weights of fewer bytes"
        )
    reads = hardware.bytes_per_second if kv == "device" else host.bandwidth * host.efficiency
    fastest = max(reads, host.link * host.efficiency)
    far = replace(
        hardware,
        bandwidth=fastest,
        bandwidth_efficiency=reads / fastest,
        weight_efficiency=host.link * host.efficiency / fastest,
    )
    return Resident(replace(cost, hardware=far, law="paper"), beside if kv == "device" else left)

"""What every part of the benchmark stands on: a device, its ceilings, sizes, a model, and a way to take time."""

from __future__ import annotations

import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import triton

from llmbatch.engine.calibration.calibrate import calibrate_device, step_kinds
from llmbatch.engine.calibration.microbenchmarks import measure_device, median_seconds
from llmbatch.engine.calibration.step_timer import StepKind
from llmbatch.engine.calibration.store import DeviceCalibration
from llmbatch.engine.devices import find_platform
from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.fp8_linear import Fp8Linear
from llmbatch.engine.gpu.graphs.mixed import mixed_sizes
from llmbatch.engine.gpu.graphs.recorder import GraphRecorder
from llmbatch.engine.gpu.strategies import Strategy, make_execution
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.outline import shape_of
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.weights.host_layers import PlainCopies
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import Hardware
from llmbatch.perf_model.shape import ModelShape
from llmbatch.perf_model.work import Rates

# Llama-3-8B, and one of the same kind that the interpreter can run.
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SMALL: dict[str, Any] = {  # Qwen3-0.6B's, of which the host is the bound
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 131072,
}


@dataclass(frozen=True)
class Sizes:
    """How large things are."""

    model: dict[str, Any]
    rows: int  # of decodes
    keys: int  # of each decode
    shared: int  # of a cascade's keys
    own: int
    step_keys: int  # of each decode of a whole step
    chunk: int  # tokens of a prefill step
    requests: int  # of a job
    pool: int | None  # pages of a job, at most; None: as many as the card has room for
    longest: int  # answer of a job
    peer: int  # rows that the peer gets
    peer_answer: int  # tokens of each of their answers, at most
    runs: int


FULL = Sizes(LLAMA_8B, 256, 4096, 2048, 512, 1024, 8192, 2000, None, 1 << 20, 64, 128, 10)
DRY = Sizes(TINY, 33, 40, 256, 30, 20, 64, 6, 600, 6, 3, 6, 1)


class Stage:
    """A device with a model of random weights."""

    def __init__(self, device: str, *, dry: bool, traces: str | None, sizes: Sizes | None = None) -> None:
        self.dry = dry
        self.sizes = sizes or (DRY if dry else FULL)
        self.traces = traces
        cpu = torch.device("cpu")
        host = Platform(cpu, GpuOps(cpu), PAGE_SIZE, max_running=512, copies=lambda _: PlainCopies(), to_fp8=Fp8Linear)
        self.platform = host if dry else find_platform(device)
        self.device = self.platform.device
        self.page_size = PAGE_SIZE

    def identity(self) -> dict[str, Any]:
        """What was measured on, when, with what, under which ceilings."""
        return {
            "device": self.ceilings.name,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": {
                "torch": torch.__version__,
                "triton": triton.__version__,
                "transformers": transformers.__version__,
            },
            "ceilings": asdict(self.ceilings),
        }

    @cached_property
    def ceilings(self) -> Hardware:
        """The card's, measured in this run."""
        if self.dry:
            return Hardware(name="interpreter", compute=1e9, bandwidth=1e9, memory=1e9)
        return measure_device(self.device, torch.bfloat16)

    @cached_property
    def has_fp8(self) -> bool:
        """Whether the device multiplies and converts numbers of e4m3."""
        return self.dry or torch.cuda.get_device_capability(self.device) >= (8, 9)

    @cached_property
    def folder(self) -> str:
        """A model's folder without weights."""
        folder = tempfile.mkdtemp(prefix="llmbatch-gpu-")
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
        config |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, **self.sizes.model}
        Path(folder, "config.json").write_text(json.dumps(config))
        return folder

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model, in bfloat16."""
        return load_model(self.folder, dtype="bfloat16", load_format="dummy", platform=self.platform)

    @cached_property
    def shape(self) -> ModelShape:
        """What it costs."""
        return shape_of(describe_model(self.folder, dtype="bfloat16", device=self.device))

    @cached_property
    def ceiling_cost(self) -> CostModel:
        """What requests cost at the card's ceilings, of an engine that runs kernel after kernel."""
        at_most = replace(self.ceilings, compute_efficiency=1.0, bandwidth_efficiency=1.0)
        return CostModel(self.shape, at_most, law="paper", overlap=SEQUENTIAL, cascade=True)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """The tokens of steps with chunks that a job records."""
        return mixed_sizes(self.shape.layers, replace(self.ceiling_cost, hardware=self.ceilings).rates)

    @cached_property
    def calibration(self) -> DeviceCalibration:
        """What the card does under each strategy, as a job measures it before it runs."""
        kinds = self.few_kinds if self.dry else step_kinds(400_000)
        pages = max(kind.pages(self.page_size) for kind in kinds)
        guess = replace(self.ceiling_cost, hardware=self.ceilings)
        return calibrate_device(guess, kinds, lambda name, rates: self.engine(name, rates, num_pages=pages))

    def cost(self, strategy: Strategy) -> CostModel:
        """What requests cost under a strategy, as calibrated."""
        return self.calibration.fitted[strategy].cost(self.shape)

    def engine(self, strategy: Strategy, rates: Rates, *, num_pages: int) -> GpuEngine:
        """An engine for the model."""
        return GpuEngine(
            self.loaded,
            TritonAttention(self.device),
            num_pages=num_pages,
            page_size=self.page_size,
            execution=make_execution(strategy, rates, self.device),
            recorder=None if self.dry else GraphRecorder(),
        )

    @property
    def few_kinds(self) -> list[StepKind]:
        """Steps of every kind, in sizes for a dry run."""
        rows, keys, chunk = self.sizes.rows, self.sizes.step_keys, self.sizes.chunk
        few, blend = StepKind(4, keys), StepKind(4, 9, ((0, chunk),))
        return [StepKind(rows, keys), StepKind(prefills=((0, chunk),)), few, blend]

    @staticmethod
    def constants(cost: CostModel) -> dict[str, float]:
        """What was fitted."""
        hardware = cost.hardware
        return {
            "compute_efficiency": hardware.compute_efficiency,
            "attention_efficiency": hardware.attention_flops / hardware.compute,
            "bandwidth_efficiency": hardware.bandwidth_efficiency,
            "step_seconds": hardware.step_seconds,
            "exponent": cost.overlap.exponent,
        }

    def seconds(self, work: Callable[[], object]) -> dict[str, float]:
        """Seconds of a piece of work, warm: the median of three medians, and the least and the most of these."""
        once = self._on_host if self.dry else lambda: median_seconds(self.device, work, runs=self.sizes.runs)
        medians = sorted(once(work) if self.dry else once() for _ in range(3))  # type: ignore[call-arg]
        return {"seconds": statistics.median(medians), "least": medians[0], "most": medians[-1]}

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal numbers on the device."""
        return torch.randn(shape, device=self.device).to(dtype)

    def there(self, array: Any) -> torch.Tensor:
        """An array on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _on_host(self, work: Callable[[], object]) -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

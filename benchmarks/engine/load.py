"""What a warm load takes: from the path of a model's file to an engine that can take its first step.

    python benchmarks/engine/load.py [--runs 5] [--model FILE_OR_FOLDER] [--json FILE]

Each run is a process of its own, which has imported every module before the clock starts. The first run of each type
converts a GGUF file, compiles, and measures the processor; it is not counted. Prints one line of JSON: for each type
the seconds of every run, and the parts of the fastest one. A part does not count those inside it. Exit status 1 where
the fastest run takes longer than it must.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from run import smollm2

# Modules that are imported where they are first needed.
LATE = (
    "llmbatch.engine.devices",
    "llmbatch.preprocess.prompts",
    "numba.np.ufunc.omppool",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_sentencepiece",
    "transformers.tokenization_utils_tokenizers",
    "transformers.utils.chat_parsing",
)
MUST = 1.0  # seconds, for each type, with the model of the demo
DTYPES = ("float32", "bfloat16", "int8", "int4")


class Parts:
    """Seconds by what they went to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function that adds its seconds to a part, but for those of parts that it calls."""

        def call(*args: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            begun = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                seconds, within = time.perf_counter() - begun, self._inside.pop()
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds - within
                if self._inside:
                    self._inside[-1] += seconds

        return call

    def count(self, name: str, owner: Any, attribute: str) -> None:
        """Count what a module calls by that name."""
        setattr(owner, attribute, self.counted(name, getattr(owner, attribute)))


def load_once(model: str, dtype: Any) -> dict[str, float]:
    """Load in this process, and return the seconds of each part."""
    from llmbatch.system.garbage import collect_seldom
    from llmbatch.system.tuning import tune_process

    collect_seldom()
    tune_process()
    from numba.core.dispatcher import Dispatcher
    from numba.core.registry import cpu_target
    from transformers import AutoConfig

    from llmbatch.engine.calibration import device_cost
    from llmbatch.engine.cpu import decoder, engine, linear, platform
    from llmbatch.engine.model import checkpoints, config, loader, refusals
    from llmbatch.inference.loading import engines
    from llmbatch.inference.options import Options
    from llmbatch.inference.progress import Silence
    from llmbatch.planning.workload import Scheduling

    cpu_target.typing_context.refresh()  # numba imports the rest of its own modules when it first loads code
    cpu_target.target_context.refresh()
    for name in LATE:
        importlib.import_module(name)
    folder = checkpoints.resolve_model(model)
    refusals.find_class(folder, AutoConfig.from_pretrained(folder))  # imports the modules of its family
    parts = Parts()
    parts.count("file", checkpoints, "resolve_model")
    parts.count("tokenizer", engines, "load_tokenizer")
    parts.count("config, and attention of layers", config, "describe_model")
    parts.count("weights", loader, "read_module")
    parts.count("probes of modules", loader, "fuse")
    parts.count("probes of layers", platform, "join_layers")
    parts.count("packing", decoder, "pack_layers")
    parts.count("packing", linear, "PackedWeight")
    parts.count("compiled code", Dispatcher, "compile")
    parts.count("measuring the processor", device_cost, "measure_cpu")
    parts.count("memory of pages", engine.CpuEngine, "__init__")

    def whole() -> None:
        folder = checkpoints.resolve_model(model)
        options = Options.build(model=model, dtype=dtype, prompt="question", device="cpu")
        engines.UnloadedEngines.open(folder, options).load(Scheduling(max_running=512), Silence()).engine()

    parts.counted("all else", whole)()
    return parts.seconds


def measure(model: str, dtype: str, runs: int) -> dict[str, Any]:
    """Load in so many processes, after one that is not counted."""
    loads = []
    for _ in range(runs + 1):
        command = [sys.executable, __file__, "--model", model, "--once", dtype]
        loads.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    seconds = [sum(load.values()) for load in loads[1:]]
    fastest = loads[1 + seconds.index(min(seconds))]
    return {
        "seconds": [round(one, 2) for one in seconds],
        "parts": {name: round(one, 3) for name, one in sorted(fastest.items(), key=lambda part: -part[1])},
    }


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file or a folder (SmolLM2-135M-Instruct)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--once", choices=DTYPES, help="load once, in this process, and print the parts")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    model = arguments.model or str(smollm2())
    if arguments.once is not None:
        print(json.dumps(load_once(model, arguments.once)))
        return 0
    figures = {dtype: measure(model, dtype, arguments.runs) for dtype in DTYPES}
    line = json.dumps(figures)
    print(line)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n")
    return int(arguments.model is None and any(min(found["seconds"]) > MUST for found in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())

"""Says where a module is now, to whoever imports it by the path that it had before version 0.1.

`import llmbatch.cost` never asks the package. For a module without a file the interpreter asks the finders of
`sys.meta_path`, and nothing else. So one finder is appended there. It is asked last, answers names below `llmbatch.`
alone, and leaves every other import as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

# Below `llmbatch.`: the old path, and the new one.
MOVED: Final = {
    "admission": "scheduler.admission",
    "advance": "scheduler.commit",
    "answers": "inference.answers.assembler",
    "beside": "system.processes",
    "book": "jobs.answer_writer",
    "budget": "scheduler.token_budget",
    "cache": "system.cache",
    "calibration": "perf_model.fit",
    "carrying": "kvcache.renumber",
    "cascade": "planning.cascade",
    "chunks": "scheduler.chunks",
    "claims": "io.writing.claims",
    "clock": "runtime.loops.simulated_loop",
    "columns": "preprocess.columns",
    "command": "jobs.resuming.fingerprint",
    "compiled": "compilation.decorators",
    "configs": "perf_model.shape",
    "contents": "kvcache.contents",
    "controls": "preprocess.tokenization.control_tokens",
    "cost": "perf_model.cost",
    "deciding": "scheduler.decide",
    "destination": "io.writing.destination",
    "disk": "storage.local",
    "driver": "runtime.loops.step_loop",
    "earlier": "jobs.resuming.prior_answers",
    "endings": "io.writing.commit_log",
    "ends": "scheduler.admission_order",
    "engines": "engine",
    "engines.accelerated": "engine.gpu.engine",
    "engines.backends": "engine.attention_choice",
    "engines.base": "engine.base",
    "engines.batch": "engine.gpu.batch",
    "engines.calibrating": "engine.calibration.calibrate",
    "engines.calibrations": "engine.calibration.store",
    "engines.ceilings": "engine.calibration.microbenchmarks",
    "engines.checkpoints": "engine.model.checkpoints",
    "engines.config": "engine.config",
    "engines.context": "engine.cpu.attention",
    "engines.description": "engine.model.config",
    "engines.device": "engine.gpu.attention",
    "engines.device_sampler": "engine.gpu.sampler",
    "engines.digests": "engine.model.digests",
    "engines.execution": "engine.gpu.execution",
    "engines.forward": "engine.gpu.model_runner",
    "engines.fusion": "engine.model.fusion.modules",
    "engines.generation": "engine.generation.buffers",
    "engines.graphs": "engine.gpu.graphs.recorder",
    "engines.host": "engine.cpu.platform",
    "engines.layers": "engine.model.fusion.layers",
    "engines.loading": "engine.model.loader",
    "engines.outline": "engine.model.outline",
    "engines.packing": "engine.packing",
    "engines.parts": "engine.gpu.microbatch",
    "engines.pieces": "engine.model.ops",
    "engines.placeholder": "engine.recorded",
    "engines.platform": "engine.model.platform",
    "engines.platforms": "engine.devices",
    "engines.preparation": "engine.preparation",
    "engines.profiling": "engine.calibration.memory_profile",
    "engines.sampler": "engine.sampling.sampler",
    "engines.seeds": "engine.generation.seeds",
    "engines.simulated": "engine.simulated",
    "engines.stopwatch": "engine.calibration.step_timer",
    "engines.strategies": "engine.gpu.strategies",
    "engines.torch": "engine.cpu.engine",
    "engines.turns": "engine.gpu.handoff",
    "engines.warming": "engine.cpu.compilation",
    "experiment": "simulation.experiment",
    "feed": "runtime.protocols",
    "finished": "io.writing.finished",
    "forecast": "jobs.forecast",
    "gate": "inference.error_policy",
    "hardware": "perf_model.hardware",
    "identity": "jobs.resuming.row_keys",
    "inputs": "io.reading.dataset",
    "interpreted": "compilation.interpreted",
    "job": "jobs.job",
    "journal": "storage.journal",
    "jsonblocks": "io.reading.json_block",
    "jsonl": "io.reading.jsonl",
    "keeping": "kvcache.eviction",
    "kernels.attention": "kernels.cpu.attention",
    "kernels.backends": "kernels.interface",
    "kernels.flash": "kernels.flash_attn",
    "kernels.fused": "kernels.cpu.fused",
    "kernels.groups": "kernels.cascade",
    "kernels.items": "kernels.work_items",
    "kernels.numerics": "kernels.cpu.numerics",
    "kernels.pointers": "kernels.cpu.pointers",
    "kernels.tile": "kernels.cpu.tiles.dot_tiles",
    "kernels.triton_attention": "kernels.triton.attention",
    "kernels.triton_backend": "kernels.triton.backend",
    "kernels.triton_fused": "kernels.triton.fused",
    "kernels.triton_sampling": "kernels.triton.argmax",
    "kernels.varlen": "kernels.torch_varlen",
    "lengths": "planning.lengths",
    "links": "io.reading.links",
    "listing": "io.reading.discovery",
    "lock": "storage.lock",
    "manifest": "io.writing.manifest",
    "measured": "system.measurements",
    "memory": "system.memory",
    "messages": "preprocess.chat",
    "mixes": "simulation.mixes",
    "opening": "jobs.resuming.resume",
    "operators.actor": "operators.ray.actor",
    "operators.flight": "operators.ray.in_flight",
    "operators.ledger": "operators.ray.ledger",
    "operators.sharding": "operators.ray.sharding",
    "options": "inference.options",
    "order": "planning.order",
    "outputs": "io.writing.output",
    "overlap": "engine.gpu.step_cost",
    "pages": "kvcache.page_pool",
    "parquet": "io.reading.parquet",
    "parser": "cli.parser",
    "partition": "planning.partition",
    "partitions": "io.reading.hive",
    "parts": "io.writing.parts",
    "passed": "scheduler.admission_order",
    "peak": "scheduler.kv_forecast",
    "picking": "io.gather",
    "plain": "io.json_values",
    "plan": "planning.plan",
    "progress": "inference.progress",
    "prompts": "preprocess.prompts",
    "publishing": "kvcache.publish",
    "reads": "kvcache.shared_reads",
    "references": "compilation.references",
    "refit": "runtime.refit",
    "refusals": "storage.retries",
    "rehearsal": "runtime.warmup",
    "report": "inference.report",
    "requests": "preprocess.request_batch",
    "respelling": "preprocess.tokenization.respelled",
    "rowhash": "io.row_hash",
    "runner": "runtime.shard_run",
    "sample": "planning.pilot_sample",
    "sampling": "preprocess.sampling_params",
    "schedule": "scheduler.scheduler",
    "schemas": "io.reading.schemas",
    "seal": "io.sealed_json",
    "shard": "preprocess.build_requests",
    "shelf": "jobs.part_builder",
    "simulate": "simulation.simulator",
    "single": "inference.table_worker",
    "slots": "scheduler.state",
    "split": "planning.outliers",
    "staging": "io.writing.formats",
    "steady": "scheduler.token_budget",
    "step": "scheduler.output",
    "stopping": "runtime.cancellation",
    "storage.Place": "storage.location.Location",
    "stream": "runtime.stream",
    "survival": "planning.survival",
    "template": "preprocess.template",
    "tokenize": "preprocess.tokenization.tokenizer",
    "traces": "simulation.traces",
    "tree": "planning.prefix_tree",
    "trie": "kvcache.page_trie",
    "union": "runtime.live_requests",
    "windows": "jobs.window_loader",
    "words": "cli.values",
    "work": "perf_model.work",
    "worker": "inference.worker",
    "workload": "planning.workload",
    "worth": "kvcache.page_worth",
}


class MovedModules(MetaPathFinder, Loader):
    """A finder that finds nothing: it raises ModuleNotFoundError for the old path of a module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise for an old path. An old package is found, empty, so that the name of its module is asked for next."""
        package, _, name = fullname.partition(".")
        if package != "llmbatch" or name not in MOVED:
            return None
        if any(old.startswith(f"{name}.") for old in MOVED):
            return ModuleSpec(fullname, self, is_package=True)
        raise _moved(name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave the making of a package to the interpreter."""

    def exec_module(self, module: ModuleType) -> None:
        """Let the names of an old package say where it is now."""
        name = module.__name__.partition(".")[2]

        def refuse(attribute: str) -> None:
            if attribute.startswith("__") or f"{name}.{attribute}" in MOVED:
                raise AttributeError(attribute)  # a module's: the finder is asked for it next
            raise _moved(name)

        module.__dict__["__getattr__"] = refuse


def _moved(name: str) -> ModuleNotFoundError:
    # Without the name of the module in the exception, since `from llmbatch import cost` drops an exception that has it.
    return ModuleNotFoundError(f"llmbatch.{name} is now llmbatch.{MOVED[name]}")


def watch_old_paths() -> None:
    """Append the finder, once."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())

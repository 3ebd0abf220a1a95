"""An endpoint on this machine that people and a job share: what both get, beside what each gets alone.

    python benchmarks/serving/endpoint.py [--rate .25] [--tpot .3] [--ttft .5] [--copies 3] [--batches] [--json FILE]

Guests are prompts of the demo dataset, each with a number of its own before it, and whether a job runs, so that none
finds another's pages. 64 tokens are asked for, and they arrive as a Poisson process. The job is the demo dataset, some
times over with a number before each prompt: `llmbatch run`, at the endpoint with `--beside`, or a file at its
`/v1/batches`. Measured one after the other, each at an endpoint of its own: the job without one, the job alone, and
with steps that have a bound and steps that have none: both, and as many guests alone. Without a bound a step of the job
is held between two layers for a guest's prompt, and the first token of a guest should come at most two layers later
than alone (`--ttft .5`: .12 s of steps of 2,048 tokens).

Guests alone arrive at the times of those beside the job: one that comes while another's prompt is computed waits
without a job, too. `guests_take` is the share of its time that the endpoint says their work took beside the job. What
is left is the most of its own speed that the job can have.

Each job runs in a process of its own, or in the endpoint's; so clients, endpoint and job share the cores. Times are
those that the guests' client sees: to the first piece of text, and between pieces. The clients' seed is fixed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))

from mixes import rows_of
from rounds import demo_model

TOKENS = 64
SEED = 7
Figures = dict[str, Any]
Job = Callable[[str], Coroutine[Any, Any, Figures]]  # at an endpoint
Waited = tuple[float, list[float]]  # of a guest: seconds to the first piece of text, and between pieces


@contextlib.contextmanager
def endpoint(model: str, ttft: float, tpot: float | None) -> Iterator[str]:
    """Run an endpoint; yields its URL."""
    command = [sys.executable, "-m", "llmbatch", "serve", "--model", model, "--port", "0", "--ttft", str(ttft)]
    bound = [] if tpot is None else ["--tpot", str(tpot)]
    state = tempfile.TemporaryDirectory()
    command += [*bound, "--state-dir", state.name]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"http://\S+", line):
                yield found[0].rstrip("/")
                break
        else:
            raise SystemExit(f"the endpoint ended with status {process.wait()}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        state.cleanup()


async def guest(client: httpx.AsyncClient, prompt: str, model: str) -> Waited:
    """Ask once."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    begun, times = time.perf_counter(), []
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                times.append(time.perf_counter())
    return times[0] - begun, np.diff(times).tolist()


async def guests(url: str, rate: float, until: asyncio.Event, prompts: list[str], name: str) -> list[Waited]:
    """Let guests arrive until the event is set, and wait for all of them; prompts begin with the name and a number."""
    rng = np.random.default_rng(SEED)
    tasks: list[asyncio.Task[Waited]] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await guest(client, "Hello", model)
        while not until.is_set():
            prompt = f"{name} {len(tasks)}. {prompts[rng.integers(len(prompts))]}"
            tasks.append(asyncio.create_task(guest(client, prompt, model)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), rng.exponential(1 / rate))
        return await asyncio.gather(*tasks)


def summary(answered: list[Waited]) -> Figures:
    """Sum up what guests waited."""
    firsts = np.array([first for first, _ in answered])
    gaps = np.concatenate([between for _, between in answered])
    return {
        "guests": len(answered),
        "first_p50": float(np.median(firsts)),
        "first_p99": float(np.quantile(firsts, 0.99)),
        "gap_p50": float(np.median(gaps)),
        "gap_p99": float(np.quantile(gaps, 0.99)),
        "gap_max": float(gaps.max()),
    }


async def job(model: str, source: Path, url: str | None) -> Figures:
    """Run the job in a process; its report."""
    with tempfile.TemporaryDirectory() as folder:
        where = [] if url is None else ["--beside", url]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "llmbatch", "run", str(source), "--output", f"{folder}/answers", "--model", model),
            *("--prompt", "prompt", "--chat", "--sampling-params", "sampling", "--json", "--quiet", *where),
            stdout=subprocess.PIPE,
        )
        told, _ = await process.communicate()
        if process.returncode:
            raise SystemExit(f"the job ended with status {process.returncode}")
        report: Figures = json.loads(told)
        return {name: report[name] for name in ("rows", "errors", "seconds", "tokens_per_second")}


async def batch(rows: pa.Table, url: str) -> Figures:
    """Run the job as a batch of the endpoint."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": model,
                    "messages": [{"role": "user", "content": row["prompt"]}],
                    "temperature": 0,
                    **json.loads(row["sampling"]),
                },
            }
            for number, row in enumerate(rows.to_pylist())
        ]
        file = "\n".join(map(json.dumps, lines)).encode()
        upload = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("job.jsonl", file)})
        begun = time.perf_counter()
        asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        made = await client.post("/v1/batches", json={"input_file_id": upload.raise_for_status().json()["id"], **asked})
        state = made.raise_for_status().json()
        while state["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.2)
            state = (await client.get(f"/v1/batches/{state['id']}")).raise_for_status().json()
        if state["status"] != "completed":
            raise SystemExit(f"the batch is {state['status']}")
        done = state["request_counts"]
        return {"rows": done["total"], "errors": done["failed"], "seconds": time.perf_counter() - begun}


async def both(work: Job, url: str, rate: float, prompts: list[str]) -> Figures:
    """Run the job while guests arrive."""
    begun, over = time.perf_counter(), asyncio.Event()
    arriving = asyncio.create_task(guests(url, rate, over, prompts, "Guest beside a job"))
    figures = await work(url)
    over.set()
    arrived = time.perf_counter() - begun
    return {**figures, **summary(await arriving), "arrived": arrived, "guests_take": await share_of_guests(url)}


async def alone(url: str, rate: float, seconds: float, prompts: list[str]) -> Figures:
    """Let guests arrive for some time."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    return summary(await guests(url, rate, over, prompts, "Guest alone"))


async def share_of_guests(url: str) -> float:
    """Return the share of its time, of an hour at most, that an endpoint's guests took."""
    async with httpx.AsyncClient(base_url=url) as client:
        told = (await client.get("/metrics")).text
    found = re.search(r"^llmbatch:guest_time_share\S* (\S+)$", told, re.MULTILINE)
    assert found is not None, "an endpoint tells what guests take"
    return float(found[1])


def measure(options: argparse.Namespace) -> dict[str, Figures]:
    """Measure all six, one after the other."""
    model, rows = options.model or demo_model(), rows_of("demo")
    prompts = [prompt for prompt, _ in rows]
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "job.parquet"
        table = pa.table(
            {
                "prompt": [f"{copy}. {one}" if copy else one for copy in range(options.copies) for one in prompts],
                "sampling": [json.dumps({"max_tokens": tokens, "ignore_eos": True}) for _, tokens in rows]
                * options.copies,
            }
        )
        pq.write_table(table, source)
        work: Job = partial(batch, table) if options.batches else partial(job, model, source)

        def note(name: str, figures: Figures) -> None:
            found[name] = figures
            print(name, json.dumps(figures), flush=True)

        note("job", asyncio.run(job(model, source, None)))
        with endpoint(model, options.ttft, options.tpot) as url:
            note("job at the endpoint", asyncio.run(work(url)))
        for bound, name in ((options.tpot, ""), (None, ", no bound")):
            with endpoint(model, options.ttft, bound) as url:
                beside = asyncio.run(both(work, url, options.rate, prompts))
                note(f"both{name}", beside)
                note(f"guests{name}", asyncio.run(alone(url, options.rate, beside["arrived"], prompts)))
    return found


def main() -> None:
    """Measure, and print each as it ends."""
    parser = argparse.ArgumentParser(description="Measure an endpoint that people and a job share.")
    parser.add_argument("--model", help="SmolLM2-135M-Instruct, unless given")
    parser.add_argument("--rate", type=float, default=0.25, help="guests a second")
    parser.add_argument("--tpot", type=float, default=0.3, help="seconds that a step may take")
    parser.add_argument("--ttft", type=float, default=0.5, help="seconds within which a first token is wanted")
    parser.add_argument("--copies", type=int, default=3, help="of the demo dataset in the job")
    parser.add_argument("--batches", action="store_true", help="the job is a file at /v1/batches")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    found = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

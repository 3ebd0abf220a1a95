"""An endpoint under clients that mean no good: what they are told, and what they leave in its memory.

    python benchmarks/serving/hostile_clients.py [--rounds 10] [--connections 1000] [--bodies 20] [--malformed 5000]

`llmbatch serve` runs SmolLM2. In each round come, one after the other: so many connections at once, each with a request
for four tokens; bodies of 100 MB, with and without their size said before; bodies that are JSON but for a byte or some
that are missing, changed or doubled; and 100 clients that ask for a stream of 400 tokens and hang up after its first
piece. After each round the endpoint must be empty, which `/metrics` says, and answer; its memory is read then. Prints a
line of JSON a round: statuses by kind, seconds until nothing ran after the last had hung up, and megabytes after each
attack and after all. Pages of KV are kept while there are others, so that the pool is small here (`--kv-memory`): it is
used up in the first rounds. Buffers of steps are kept as large as the largest step wanted them, so that a long prompt
comes before the first round. What grows after that is something else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))

from rounds import demo_model

URL = "/v1/completions"
HUNDRED_MB = 100_000_000
VALID = json.dumps({
    "prompt": "one, two, three", "max_tokens": 1, "temperature": 0.5, "stop": ["\n", "\u00e9"], "seed": 3,
    "logit_bias": {"17": -2.5}, "stream_options": None, "n": 1,
}).encode()  # fmt: skip  # a table


def malformed(count: int, rng: np.random.Generator) -> Iterator[bytes]:
    """Yield bodies with a part of them cut off, left out, changed or doubled."""
    for _ in range(count):
        first, last = np.sort(rng.integers(0, len(VALID) + 1, 2))
        match rng.integers(4):
            case 0:
                yield VALID[:first]
            case 1:
                yield VALID[:first] + VALID[last:]
            case 2:
                yield VALID[:first] + rng.bytes(int(rng.integers(1, 5))) + VALID[first + 1 :]
            case _:
                yield VALID[:last] + VALID[first:]


async def told(client: httpx.AsyncClient, **content: Any) -> str:
    """Send a body; the status, or how the connection ended."""
    try:
        answer = await client.post(URL, headers={"content-type": "application/json"}, **content)
    except httpx.TransportError as error:
        return type(error).__name__
    if answer.status_code != 200 and set(answer.json()["error"]) != {"message", "type", "param", "code"}:
        raise SystemExit(f"not an error of OpenAI's form: {answer.text}")
    return str(answer.status_code)


async def connect(url: str, count: int) -> Counter[str]:
    """Ask over so many connections at once."""
    most = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=most) as client:
        asked = ({"prompt": f"Number {number}", "max_tokens": 4, "ignore_eos": True} for number in range(count))
        return Counter(await asyncio.gather(*(told(client, json=body) for body in asked)))


async def send_bodies(url: str, count: int) -> Counter[str]:
    """Send bodies of 100 MB."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * (HUNDRED_MB // 100)

    kinds: tuple[Callable[[], Any], ...] = (lambda: b" " * HUNDRED_MB, pieces)
    found: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for number in range(count):
            found[await told(client, content=kinds[number % 2]())] += 1
    return found


async def send_malformed(url: str, count: int, seed: int) -> Counter[str]:
    """Send bodies that are nearly JSON."""
    found: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for body in malformed(count, np.random.default_rng(seed)):
            found[await told(client, content=body)] += 1
    return found


async def hang_up(url: str, count: int) -> None:
    """Ask for streams and leave each after its first piece."""
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}

    async def leave(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", URL, json=body) as answer:
            async for _ in answer.aiter_bytes():
                return

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=count)) as client:
        await asyncio.gather(*(leave(client) for _ in range(count)))


def wait_until_empty(url: str) -> float:
    """Wait until nothing runs or waits; the seconds that it took."""
    begun = time.perf_counter()
    while True:
        page = httpx.get(f"{url}/metrics").text
        found = re.findall(r"^llmbatch:num_requests_(?:running|waiting)\{.*\} (\S+)$", page, re.MULTILINE)
        if len(found) == 2 and not any(map(float, found)):
            return time.perf_counter() - begun
        time.sleep(0.02)


def megabytes(process: int) -> float:
    """The resident memory of a process."""
    with open(f"/proc/{process}/status") as status:
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status.read())[0]) / 1e3


def attack(url: str, process: int, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Run a round; what was told and left."""
    attacks: dict[str, Callable[[], Any]] = {
        "connections": lambda: asyncio.run(connect(url, options.connections)),
        "bodies": lambda: asyncio.run(send_bodies(url, options.bodies)),
        "malformed": lambda: asyncio.run(send_malformed(url, options.malformed, number)),
        "seconds_until_empty": lambda: (asyncio.run(hang_up(url, 100)), wait_until_empty(url))[1],
    }
    figures, memory = {}, {}
    for name, run in attacks.items():
        figures[name] = run()
        memory[name] = megabytes(process)
    httpx.post(f"{url}{URL}", json={"prompt": "Are you there?", "max_tokens": 2}, timeout=600).raise_for_status()
    return {**figures, "megabytes_by_attack": memory, "megabytes": megabytes(process)}


def main() -> None:
    """Attack, and print each round as it ends."""
    parser = argparse.ArgumentParser(description="Attack an endpoint on this machine.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--bodies", type=int, default=20)
    parser.add_argument("--malformed", type=int, default=5000)
    parser.add_argument("--kv-memory", type=int, default=2**28, help="bytes of the pool of pages")
    options = parser.parse_args()
    command = [sys.executable, "-m", "llmbatch", "serve", "--model", demo_model(), "--port", "0", "--max-tokens", "4"]
    state = tempfile.TemporaryDirectory()
    command += ["--kv-memory", str(options.kv_memory), "--state-dir", state.name]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(found[0].rstrip("/") for line in process.stderr if (found := re.search(r"http://\S+", line)))
        long = {"prompt": "one " * 2000, "max_tokens": 1}
        httpx.post(f"{url}{URL}", json=long, timeout=600).raise_for_status()
        for number in range(options.rounds):
            print(json.dumps(attack(url, process.pid, options, number)), flush=True)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        state.cleanup()


if __name__ == "__main__":
    main()

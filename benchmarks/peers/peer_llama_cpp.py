"""llmbatch against llama.cpp's server with parallel slots on the same rows, in one run, engines alternating.

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36  # llama.cpp in vendor/llama.cpp
    cmake -S LLAMA_CPP -B BUILD -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \\
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
    cmake --build BUILD --target llama-server
    python benchmarks/peers/gguf_file.py LLAMA_CPP FOLDER FILE --type bf16
    python benchmarks/peers/peer_llama_cpp.py --server BUILD/bin/llama-server --gguf FILE --dtype bfloat16
        [--mix answers]

The server of llama-cpp-python answers one request at a time; `llama-server`, made of the same source, has slots that
are computed in one batch. What a round is, and what of it is counted, says `peers/rounds.py`; which rows there are,
`peers/mixes.py`; `peers/second_family.py` makes the model of another family that `--model` may name.

Equal precision: the GGUF file is made of the very folder that llmbatch runs, as bf16 (or f16) beside `--dtype bfloat16`
and as q8_0 beside `--dtype int8`. FOLDER of SmolLM2 is printed as `model` when a run begins.

The peer runs as its documentation advises for throughput: compiled for this processor, continuous batching, a thread
per core, flash attention, prompt caching (a slot keeps its last prompt, a row goes to the free slot that shares most
with it, and prompts of slots that were taken for others are kept in memory). It has a context of 2048 tokens for each
slot. Its prompts are sent as tokens, made here within the time that is counted, by more connections than there are
slots, so none waits for the client. Greedy sampling looks at one candidate.

16 slots, bf16 and the longest answers first (two-token rows then find their prefix in the few slots that are free) are
what was fastest of single small runs with SmolLM2 on one thread of a busy machine, against 8 or 32 slots, f16, and rows
as they come or sorted. That is a hint, not a measurement: try the options where the ratio matters.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from rounds import WARM, WARM_TOKENS, Figures, Peer, Work, run

CONTEXT = 2048  # of a slot
ORDERS = ("longest", "input", "sorted")
START_SECONDS = 120


def measure(work: Work) -> Figures:
    """Answer the rows through a server that is started for them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    given, prompts, lengths = work["settings"], work["prompts"], work["max_tokens"]
    rank: dict[str, Any] = {"sorted": prompts.__getitem__, "input": int, "longest": lambda row: -lengths[row]}
    with serving(work) as port:
        clients = 2 * given["parallel"]
        answers(port, tokenizer(WARM)["input_ids"], [WARM_TOKENS] * len(WARM), range(len(WARM)), clients)
        begun = time.perf_counter()
        order = sorted(range(len(prompts)), key=rank[given["order"]])
        answered = answers(port, tokenizer(prompts)["input_ids"], lengths, order, clients)
        seconds = time.perf_counter() - begun
    inputs = [answer["tokens_evaluated"] for answer in answered]
    return {
        "seconds": seconds,
        "input_tokens": sum(inputs),
        "cached_tokens": sum(inputs) - sum(answer["timings"]["prompt_n"] for answer in answered),
        "generated": [answer["tokens_predicted"] for answer in answered],
        "texts": [answer["content"] for answer in answered],
    }


@contextlib.contextmanager
def serving(work: Work) -> Iterator[int]:
    """A server, ready, as the port that it listens on."""
    given, cores = work["settings"], str(work["cores"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [given["server"], "--model", given["gguf"], "--host", "127.0.0.1", "--port", str(port), "--offline"]
    command += ["--threads", cores, "--threads-batch", cores, "--parallel", str(given["parallel"])]
    command += ["--ctx-size", str(CONTEXT * given["parallel"]), "--no-kv-unified", "--cont-batching"]
    command += ["--batch-size", str(given["batch"]), "--ubatch-size", str(given["ubatch"])]
    command += ["--flash-attn", "on", "--cache-prompt", "--cache-ram", str(given["cache_ram"])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr) as server:
        try:
            for _ in range(10 * START_SECONDS):
                if server.poll() is not None:
                    raise SystemExit(f"the server ended with status {server.returncode}")
                with contextlib.suppress(OSError):
                    if request(http.client.HTTPConnection("127.0.0.1", port), "GET", "/health")[0] == 200:
                        break
                time.sleep(0.1)
            yield port
        finally:
            server.terminate()


def answers(port: int, tokens: list[list[int]], lengths: list[int], order: Any, clients: int) -> list[dict[str, Any]]:
    """The server's answers to the rows, which are asked for in that order by so many connections."""
    found: dict[int, dict[str, Any]] = {}
    waiting, lock = iter(order), threading.Lock()

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while True:
            with lock:
                row = next(waiting, None)
            if row is None:
                return
            body = {"prompt": tokens[row], "n_predict": lengths[row], "ignore_eos": True, "cache_prompt": True}
            status, answer = request(connection, "POST", "/completion", body | {"samplers": ["top_k"], "top_k": 1})
            found[row] = answer if status == 200 else {}

    threads = [threading.Thread(target=ask) for _ in range(min(clients, len(lengths)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(found.get(row) for row in range(len(lengths))):
        raise SystemExit("the server did not answer every row")
    return [found[row] for row in range(len(lengths))]


def request(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of one request."""
    connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its settings."""
    add = parser.add_argument
    add("--server", help="the program llama-server")
    add("--gguf", help="the model as the peer reads it")
    add("--peer-parallel", type=int, default=16, help="slots")
    add("--peer-batch", type=int, default=2048, help="tokens of a logical batch")
    add("--peer-ubatch", type=int, default=512, help="tokens of a physical batch")
    add("--peer-cache-ram", type=int, default=8192, help="MiB for prompts of slots that were taken for others")
    add("--peer-order", choices=ORDERS, default=ORDERS[0], help="in which it is asked the rows")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Its settings by the names of its options."""
    if options.server is None or options.gguf is None:
        raise SystemExit("--server and --gguf are required")
    return {
        "server": os.path.abspath(options.server),
        "gguf": os.path.abspath(options.gguf),
        "parallel": options.peer_parallel,
        "batch": options.peer_batch,
        "ubatch": options.peer_ubatch,
        "cache_ram": options.peer_cache_ram,
        "order": options.peer_order,
    }


if __name__ == "__main__":
    raise SystemExit(run(Peer("llama.cpp", measure, add_options, settings, lambda _: {})))

"""Measures models of twice the memory that their weights may take, on the processor.

    python benchmarks/engine/weights_on_disk.py FOLDER [--rows 2000] [--peer-rows 200]

FOLDER gets two dummy models and their rows: a dense one of 2 GB and a mixture of 4 GB. Each runs with all memory, then
in a control group (version 1 or 2; root may make one) whose limit leaves the weights half their size, and transformers
runs with accelerate's offload to disk in the same group. Each run is a process of its own. The figures are left in
FOLDER/found.json, and the table goes to docs/results/weights-on-disk.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
RESULT: Final = ROOT / "docs" / "results" / "weights-on-disk.md"
TEXT: Final = """# Models of twice the memory that their weights may take

Written by `benchmarks/engine/weights_on_disk.py`, on two cores, in float32, greedy. A dense model has 20 layers, a
mixture has 14 of 32 experts, of which a token is sent to two; weights are random. Half: in a control group whose limit
is half the weights' bytes and 2 GB for all else (libraries, KV, activations), with `--weights disk --weights-memory`
half the weights. The group's peak counts the system's cache of files; memory that is not of files stands behind it.
Wanted: .70 of the speed, equal answers, never killed, and 5 times as fast as transformers with accelerate's offload to
disk in such a group, at the better of two batch sizes.

What bounds it: 2,000 rows of the dense model take 26 TFLOP and of the mixture 10.5. Two cores of an EPYC of Zen 4
multiply float32 at 198 GFLOP/s at most, so there nobody ends sooner than after 130 and 53 s. Beside the peer's seconds
below that is 2.6 and 5.7 times as fast. Which processor these were measured on was not noted.

| model | rows | all, s | half, s | speed | equal answers | peak, GB; not of files | killed | peer, s a row | over it |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
_BESIDE: Final = 2_000_000_000  # bytes of the limit that are not for weights: libraries, KV, activations
_ANSWER: Final = {"dense": 2, "experts": 6}  # tokens
_PROMPT: Final = {"dense": (8, 14), "experts": (14, 28)}  # tokens, from and to
_KV: Final = 400_000_000
_GROUPS: Final = Path("/sys/fs/cgroup")


def main() -> None:
    """Run all, one after the other, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--peer-rows", type=int, default=200)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if given.child is not None:
        asked = json.loads(given.child)
        child: Any = {"ours": _ours, "peer": _peer}[asked.pop("kind")]
        print(json.dumps(child(**asked)))
        return
    found: dict[str, dict[str, Any]] = {}
    for name in ("dense", "experts"):
        model, size = _prepare(given.folder, name, given.rows)
        limit = size // 2 + _BESIDE
        common = {"model": str(model), "name": name}
        runs = {
            "all": ({**common, "kind": "ours", "memory": 2 * size}, None),
            "half": ({**common, "kind": "ours", "memory": size // 2}, limit),
            "peer": ({**common, "kind": "peer", "memory": size // 2, "rows": given.peer_rows}, limit),
        }
        found[name] = {"size": size, "limit": limit}
        for run, (asked, most) in runs.items():
            found[name][run] = said = _run(given, asked, most)
            print(name, run, {key: value for key, value in said.items() if key != "answers"}, flush=True)
            (given.folder / "found.json").write_text(json.dumps(found))
    RESULT.write_text(page_of(found), encoding="utf-8")


def page_of(found: dict[str, dict[str, Any]]) -> str:
    """Write what was found down, of the dense model and of the mixture."""
    page = TEXT
    for name, of in found.items():
        every, half, peer = of["all"], of["half"], of["peer"]
        equal = sum(one == other for one, other in zip(every["answers"], half["answers"], strict=True))
        best = min(peer.get("row_seconds", {}).values(), default=float("nan"))
        page += (
            f"| {name}, {of['size'] / 1e9:.2f} GB | {every['rows']:,} | {every['seconds']:.1f} | "
            f"{half['seconds']:.1f} | **{every['seconds'] / half['seconds']:.2f}** | {equal:,} | "
            f"{half['peak'] / 1e9:.2f} of {of['limit'] / 1e9:.2f}; {half['anonymous'] / 1e9:.2f} | {half['killed']} | "
            f"{best:.2f} | **{best / (half['seconds'] / half['rows']):.1f}** |\n"
        )
    return page


def _prepare(folder: Path, name: str, rows: int) -> tuple[Path, int]:
    """Write a model and its rows unless they are there; returns its folder, and the bytes of its weights."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from weights_on_disk_models import DENSE, EXPERTS, write_model

    model = write_model(folder / name, {"dense": DENSE, "experts": EXPERTS}[name])
    rng = np.random.default_rng(0)
    low, high = _PROMPT[name]
    prompts = [rng.integers(0, 256, rng.integers(low, high + 1)).tolist() for _ in range(rows)]
    pq.write_table(pa.table({"prompt": prompts}), folder / f"{name}.parquet")
    return model, sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _run(given: argparse.Namespace, asked: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Run a child, in a group of its own if there is a limit; returns what it says, and the group's peak."""
    group = None if limit is None else _make_group(limit)
    rows = ["--rows", str(given.rows)]
    command = [sys.executable, __file__, str(given.folder), *rows, "--child", json.dumps(asked)]

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=enter, cwd=Path(__file__).parent, check=False)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    said["status"] = done.returncode
    if group is not None:
        peak = next(group / one for one in ("memory.max_usage_in_bytes", "memory.peak") if (group / one).exists())
        said["peak"] = int(peak.read_text())
        events = (group / ("memory.oom_control" if _is_first() else "memory.events")).read_text()
        said["killed"] = dict(line.split() for line in events.splitlines()).get("oom_kill", "0")
        group.rmdir()
    return said


def _is_first() -> bool:
    return (_GROUPS / "memory").is_dir()


def _make_group(limit: int) -> Path:
    group = (_GROUPS / "memory" if _is_first() else _GROUPS) / f"llmbatch-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if _is_first() else "memory.max")).write_text(str(limit))
    return group


def _ours(model: str, name: str, memory: int) -> dict[str, Any]:
    import pyarrow.parquet as pq

    from llmbatch import LLMOperator

    table = pq.read_table(Path(model).parent / f"{name}.parquet")
    operator = LLMOperator(
        model=model, prompt="prompt", dtype="float32", max_tokens=_ANSWER[name], ignore_eos=True,
        weights="disk", weights_memory=memory, kv_memory=_KV, context_length=64,
    )  # fmt: skip  # arguments in groups
    begun = time.perf_counter()
    operator(table.slice(0, 64))  # loads, and compiles
    loaded = time.perf_counter() - begun
    begun = time.perf_counter()
    answers = operator(table)
    seconds = time.perf_counter() - begun
    column = next(one for one in answers.column_names if one not in table.column_names)
    return {
        "seconds": seconds, "load": loaded, "rows": len(table), "anonymous": _anonymous(),
        "answers": answers[column].to_pylist(), "columns": answers.column_names,
    }  # fmt: skip  # a table


def _peer(model: str, name: str, memory: int, rows: int) -> dict[str, Any]:
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoModelForCausalLM

    prompts = pq.read_table(Path(model).parent / f"{name}.parquet")["prompt"].to_pylist()[:rows]
    begun = time.perf_counter()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, device_map="auto", max_memory={"cpu": memory},
        offload_folder=str(Path(model).parent / f"{name}-offload"),
    )  # fmt: skip  # arguments in groups
    load, best = time.perf_counter() - begun, {}
    for size in (rows, rows // 4):
        begun = time.perf_counter()
        for first in range(0, rows if size == rows else size, size):
            some = prompts[first : first + size]
            width = max(map(len, some))
            ids = torch.tensor([[258] * (width - len(one)) + one for one in some])
            mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in some])
            with torch.inference_mode():
                loaded.generate(
                    input_ids=ids, attention_mask=mask, do_sample=False, pad_token_id=258,
                    max_new_tokens=_ANSWER[name], min_new_tokens=_ANSWER[name],
                )  # fmt: skip  # arguments in groups
        best[size] = (time.perf_counter() - begun) / size
    return {"row_seconds": best, "load": load, "anonymous": _anonymous()}


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


if __name__ == "__main__":
    main()

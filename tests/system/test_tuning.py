"""What a run changes in its process, and that importing changes nothing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

_SHOWN = "GOMP_SPINCOUNT", "NUMBA_THREADING_LAYER_PRIORITY"


def environment_after(program: str, **given: str) -> dict[str, str | None]:
    """The variables that a fresh process has after the program."""
    program = f"import json, os\n{program}\nprint(json.dumps([os.environ.get(name) for name in {_SHOWN}]))"
    clean = {name: value for name, value in os.environ.items() if name not in (*_SHOWN, "LLMBATCH_TUNE")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**clean, **given})
    return dict(zip(_SHOWN, json.loads(done.stdout)))


TUNE = "from llmbatch.system.tuning import tune_process\ntune_process()"


@pytest.mark.parametrize("program", ["import llmbatch", "import llmbatch.engine.cpu.engine", "import llmbatch.kernels"])
def test_importing_changes_nothing(program: str) -> None:
    assert environment_after(program) == dict.fromkeys(_SHOWN)


def test_tuning_sets_how_threads_wait_and_whose_they_are() -> None:
    assert environment_after(TUNE) == {_SHOWN[0]: "10000", _SHOWN[1]: "omp tbb workqueue"}


def test_what_is_set_already_stays() -> None:
    given = {_SHOWN[0]: "7", _SHOWN[1]: "workqueue"}
    assert environment_after(TUNE, **given) == given


def test_tuning_is_switched_off_by_the_environment() -> None:
    assert environment_after(TUNE, LLMBATCH_TUNE="0") == dict.fromkeys(_SHOWN)


def test_tuning_reaches_numba_where_it_is_there_already() -> None:
    asked = "import numba\nassert numba.config.THREADING_LAYER_PRIORITY[0] == 'omp'"
    assert environment_after(f"import numba\n{TUNE}\n{asked}") == environment_after(TUNE)


KEEPS = """
import threading
import numpy as np
from llmbatch.system.tuning import give_back_freed_memory, tune_process

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

def work():
    blocks = [np.ones(1 << 20) for _ in range(20)]
    last = np.ones(1)
    del blocks

tune_process()
before = resident()
thread = threading.Thread(target=work)
thread.start()
thread.join()
kept = resident() - before
give_back_freed_memory()
print(kept, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep nothing")
def test_memory_that_ended_threads_freed_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPS], check=True, capture_output=True, text=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 100, "there is nothing to give back"
    assert left < 20

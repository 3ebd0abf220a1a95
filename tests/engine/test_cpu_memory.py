"""Memory of weights and of keys and values on the processor."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from llmbatch.engine.cpu.memory import huge_pages


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts a process's memory again when it forks")
def test_a_process_that_may_claim_more_memory_than_there_is_forks() -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    claimed = [huge_pages((whole // 4 * 3,), np.uint8) for _ in range(2)]
    child = [sys.executable, "-c", ""]
    assert subprocess.run(child, preexec_fn=os.setsid, check=False).returncode == 0  # what makes it fork
    assert not any(memory[:1].any() for memory in claimed)


def test_memory_that_the_system_does_not_give_is_an_error_of_memory() -> None:
    with pytest.raises(MemoryError, match=r"of 140,737,488,355,328 bytes$"):
        huge_pages((1 << 47,), np.uint8)

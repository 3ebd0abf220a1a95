"""Standard streams that are closed, full or read by nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SAFE = "import os, sys; from llmbatch.system.standard_streams import make_streams_safe; make_streams_safe(); "


def shell(program: str, streams: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Python with what a shell does to its streams."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {streams}', sys.executable, SAFE + program], capture_output=True, text=True
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_file_gets_no_number_of_a_stream_that_is_closed(tmp_path: Path, stream: str) -> None:
    number = {"stdout": 1, "stderr": 2}[stream]
    program = f"file = open({str(tmp_path / 'file')!r}, 'w'); os.write({number}, b'lost'); sys.{stream}.write('lost')"
    done = shell(program, f"{number}>&-")
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == ""


def test_what_standard_error_does_not_take_ends_nothing() -> None:
    done = shell("print('said', file=sys.stderr); print('done')", "2>/dev/full")
    assert (done.returncode, done.stdout) == (0, "done\n")

"""Why a rank ended, as it says itself in place of a traceback: on its standard output, which the first rank reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, TextIO

from llmbatch.errors import LLMBatchError


class RankLost(RuntimeError):
    """A rank cannot be reached: its process has ended."""

    def __init__(self, why: str, *, by_signal: bool = False) -> None:
        """Say why; `by_signal`: somebody has ended it."""
        super().__init__(why)
        self.by_signal = by_signal


@contextmanager
def reporting() -> Iterator[None]:
    """Be a rank: where it must end, say why to the first one. What libraries print goes nowhere."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as report, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        try:
            yield
        except RankLost:
            sys.exit(1)  # the first one starts others
        except (LLMBatchError, MemoryError, OSError) as error:
            _end(report, error)
        except RuntimeError as error:
            if "memory" not in str(error).lower():
                raise
            _end(report, error)  # as torch says that there is none


def _end(report: TextIO, error: Exception) -> NoReturn:
    report.write(str(error).strip().split("\n")[0] or type(error).__name__)
    report.flush()
    sys.exit(1)

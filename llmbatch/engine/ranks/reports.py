"""Why a rank ended, as it says itself in place of a traceback: on its standard output, which the first rank reads."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from llmbatch.errors import LLMBatchError


class RankLost(RuntimeError):
    """A rank cannot be reached: its process has ended."""

    def __init__(self, why: str, *, by_signal: bool = False) -> None:
        """Say why; `by_signal`: somebody has ended it."""
        super().__init__(why)
        self.by_signal = by_signal


@contextmanager
def reporting() -> Iterator[None]:
    """Be a rank, and then end the process without ado; where it must end, say why to the first one.

    What libraries print goes nowhere. Nothing is taken apart: a group of GPUs would wait for the others.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as report, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        status = 1
        try:
            yield
            status = 0
        except (RankLost, LLMBatchError, MemoryError, OSError, RuntimeError) as error:
            told = isinstance(error, (RankLost, LLMBatchError, OSError)) or "memory" in str(error).lower()
            if told or isinstance(error, MemoryError):
                report.write(str(error).strip().split("\n")[0] or type(error).__name__)
            else:
                traceback.print_exc()
        except BaseException:
            traceback.print_exc()
        finally:
            report.flush()
            sys.stderr.flush()
            os._exit(status)

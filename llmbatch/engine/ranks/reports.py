"""What a rank says of itself on its standard output, which the first rank reads.

It says that it has loaded its share, and, in place of a traceback, why it ends.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, TextIO

from llmbatch.errors import LLMBatchError

LOADED: Final = "\n"  # what a rank says once it has loaded its share
LOST: Final = 2  # the status of a rank that ended since another one has
_WORDS: Final = 300  # characters of a library's error that are said
_NO_MEMORY: Final = ("out of memory", "allocate memory")  # in what torch says


class RankLost(RuntimeError):
    """A rank cannot be reached: its process has ended."""

    def __init__(self, why: str, *, by_signal: bool = False) -> None:
        """Say why; `by_signal`: somebody has ended it."""
        super().__init__(why)
        self.by_signal = by_signal

    @classmethod
    def by_error(cls, error: Exception) -> RankLost:
        """Take an error of a library that did not reach a rank; the end of its words says why."""
        return cls(f"a rank does not answer: {' '.join(str(error).split())[-_WORDS:]}")


@contextmanager
def reporting() -> Iterator[Callable[[], None]]:
    """Be a rank, and then end the process without ado; where it must end, say why to the first one.

    Gives what is to be called once the share is loaded. What libraries print goes nowhere. Nothing is taken apart: a
    group of GPUs would wait for the others.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as report, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        status = 1
        try:
            yield partial(_write, report, LOADED)
            status = 0
        except RankLost as error:
            status = LOST
            _say(report, error)
        except (LLMBatchError, MemoryError, OSError) as error:
            _say(report, error)
        except RuntimeError as error:
            if any(words in str(error).lower() for words in _NO_MEMORY):
                _say(report, error)
            else:
                traceback.print_exc()
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stderr.flush()
            finally:
                os._exit(status)


def _say(report: TextIO, error: Exception) -> None:
    _write(report, str(error).strip().split("\n")[0] or type(error).__name__)


def _write(report: TextIO, words: str) -> None:
    with suppress(OSError):  # nobody is there any more
        report.write(words)
        report.flush()

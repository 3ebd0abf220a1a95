"""What a person sees while a job runs: a bar on a terminal or in a notebook, plain lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from llmbatch.arguments import refusal

LINE_SECONDS = 10.0  # between two plain lines
_PATIENCE = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Advance:
    """How far a job has come."""

    rows: int
    tokens: int  # input and output tokens of the rows answered
    errors: int = 0  # rows of these that failed


Advance.__module__ = "llmbatch"  # which it is imported from


class Progress(Protocol):
    """Shows how a job advances. Messages and figures go to standard error."""

    def start(self, rows: int) -> None:
        """Take note that the job has this many rows to answer."""
        ...

    def advance(self, done: Advance) -> None:
        """Show how much is done since the start."""
        ...

    def say(self, sentence: str) -> None:
        """Tell the user something."""
        ...


Progress.__module__ = "llmbatch"  # which it is imported from


class Silence:
    """Shows nothing. A base for progress that shows less than all of it."""

    def start(self, rows: int) -> None:
        """Pass over how many rows there are."""

    def advance(self, done: Advance) -> None:
        """Pass over what is done."""

    def say(self, sentence: str) -> None:
        """Pass over what there is to tell."""


class Bar:
    """A tqdm bar with rows, tokens per second and the time left; a widget in a notebook that has ipywidgets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None
        self._begun = 0.0

    def start(self, rows: int) -> None:
        """Draw the bar."""
        self._begun = time.perf_counter()
        self._bar = _tqdm()(total=rows, unit="row", file=self._stream, dynamic_ncols=True)

    def advance(self, done: Advance) -> None:
        """Move the bar; it closes itself when full."""
        seconds = time.perf_counter() - self._begun
        self._bar.set_postfix_str(f"{done.tokens / max(seconds, 1e-9):,.0f} tokens/s", refresh=False)
        self._bar.update(done.rows - self._bar.n)
        if self._bar.n >= self._bar.total:
            self._bar.close()

    def say(self, sentence: str) -> None:
        """Write above the bar."""
        _tqdm().write(f"llmbatch: {sentence}", file=self._stream)


def _tqdm() -> Any:
    """Import the class of bars that fits where the job runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no widget: a bar of text will do
        from tqdm.auto import tqdm
    return tqdm


class Lines:
    """A plain line at the start, every ten seconds, and at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rows = 0
        self._begun = self._last = 0.0

    def start(self, rows: int) -> None:
        """Say the total."""
        self._rows = rows
        self._begun = self._last = time.perf_counter()
        self.say(f"{rows:,} rows to answer")

    def advance(self, done: Advance) -> None:
        """Write a line if it is time for one."""
        now = time.perf_counter()
        if now - self._last < LINE_SECONDS and done.rows < self._rows:
            return
        self._last = now
        seconds = now - self._begun
        left = seconds / done.rows * (self._rows - done.rows) if done.rows else float("nan")
        self.say(
            f"{done.rows:,} of {self._rows:,} rows, {done.tokens / max(seconds, 1e-9):,.0f} tokens/s, "
            f"{'?' if done.rows == 0 else f'{left:,.0f}'} s left"
        )

    def say(self, sentence: str) -> None:
        """Write a line."""
        print(f"llmbatch: {sentence}", file=self._stream, flush=True)


@contextlib.contextmanager
def saying(progress: Progress, sentence: str) -> Iterator[None]:
    """Say what is being done where it takes longer than people wait without a word."""
    timer = threading.Timer(_PATIENCE, progress.say, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def choose(*, quiet: bool, stream: TextIO | None = None) -> Progress:
    """Choose the progress that fits where the job runs."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return Silence()
    return Bar(stream) if stream.isatty() or _in_notebook() else Lines(stream)


def unless_chosen(progress: Progress | None) -> Progress:
    """Return what a caller chose; if nothing, a bar in a notebook, and silence elsewhere. Raises ParameterError."""
    return choose(quiet=not _in_notebook()) if progress is None else checked(progress)


def checked(progress: Progress) -> Progress:
    """Return `progress`. Raises ParameterError if it is none."""
    if not all(callable(getattr(progress, name, None)) for name in ("start", "advance", "say")):
        raise refusal("progress", "have the methods start, advance and say (llmbatch.Progress)", progress)
    return progress


def _in_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None

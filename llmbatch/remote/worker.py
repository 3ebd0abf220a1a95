"""Answers tables at endpoints: what is the same whether rows are sent one by one or in windows."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from llmbatch.errors import JobError
from llmbatch.inference.answers.assembler import AnswerSink, FlushPolicy
from llmbatch.inference.options import Options
from llmbatch.inference.report import Report, RowCounts
from llmbatch.inference.table_worker import TableWorker
from llmbatch.inference.window import Window
from llmbatch.remote.endpoint import R, RemoteEndpoint, S
from llmbatch.remote.exchange import Exchange
from llmbatch.remote.retries import PATIENCE
from llmbatch.runtime.protocols import Stop, Totals, WindowSource

_LOOK: Final = 0.2  # seconds between two looks at what is not an answer


R_contra = TypeVar("R_contra", contravariant=True)


class Dispatcher(Protocol[S, R_contra]):
    """Cuts windows into what is sent to endpoints, and takes what they reply."""

    def joined(self, window: Window) -> Iterable[S]:
        """See a window; returns what is to be sent of it."""
        ...

    def add(self, sent: S, told: R_contra) -> None:
        """Take what was told of something that was sent."""
        ...

    def after_step(self) -> None:
        """Hand on what was gathered, if it is time, and let the sink look after what does not wait for answers."""
        ...

    def flush(self) -> None:
        """Hand on what was gathered."""
        ...


class RemoteWorker(TableWorker, Generic[S, R]):
    """Answers tables at endpoints."""

    def __init__(self, options: Options, load_seconds: float) -> None:
        self.options = options
        self.load_seconds: float = load_seconds

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told about options."""
        return self.options.notes

    def load(self) -> object:
        """Do nothing: the endpoints have the model."""
        return self

    def stream(
        self,
        windows: WindowSource[Window],
        sink: AnswerSink,
        *,
        at_risk: FlushPolicy | None = None,
        goes_on: bool = False,
    ) -> Totals:
        """Answer every row of the windows at the endpoints (`TableWorker.stream`)."""
        dispatcher = self._dispatcher(sink, at_risk or FlushPolicy())
        with Exchange(self._endpoints(), PATIENCE) as exchange:
            try:
                self._run(windows, exchange, dispatcher)
            except Stop as stop:
                exchange.stop_sending()
                while exchange.in_flight and time.monotonic() < stop.deadline:
                    _take(exchange, dispatcher, min(_LOOK, max(0.0, stop.deadline - time.monotonic())))
                _take(exchange, dispatcher, 0.0)
                dispatcher.flush()
                raise
            except (JobError, KeyboardInterrupt):
                dispatcher.flush()
                raise
        dispatcher.flush()
        return Totals(reason=self._reason)

    def report(self, tally: RowCounts, totals: Totals, *, notes: tuple[str, ...], seconds: float) -> Report:
        """Return the figures of what was done."""
        return Report.of(
            tally,
            load_seconds=self.load_seconds,
            seconds=seconds,
            preemptions=0,
            steps=0,
            order=self.options.order,
            reason=totals.reason,
            order_gain=None,
            model=self.options.model,
            dtype=self.dtype,
            kv_memory=0,
            notes=notes,
        )

    @property
    @abstractmethod
    def _reason(self) -> str:
        """Why rows are answered in the order in which they are."""

    @abstractmethod
    def _endpoints(self) -> Sequence[RemoteEndpoint[S, R]]:
        """Make the endpoints of a stream."""

    @abstractmethod
    def _dispatcher(self, sink: AnswerSink, at_risk: FlushPolicy) -> Dispatcher[S, R]:
        """Make what sends windows of a stream."""

    def _wants_window(self, exchange: Exchange[S, R]) -> bool:
        """Tell whether the next window should join."""
        return exchange.waiting < exchange.limit

    def _run(self, windows: WindowSource[Window], exchange: Exchange[S, R], dispatcher: Dispatcher[S, R]) -> None:
        """Run windows until there are no more; the next one is sent for when little waits."""
        while True:
            if self._wants_window(exchange):
                window = windows.next(not exchange.pending)
                if window is not None:
                    exchange.put(dispatcher.joined(window))
                elif not exchange.pending:
                    return
            _take(exchange, dispatcher, _LOOK if exchange.pending else 0.0)
            dispatcher.after_step()


def _take(exchange: Exchange[S, R], dispatcher: Dispatcher[S, R], timeout: float) -> None:
    for sent, told in exchange.take(timeout):
        dispatcher.add(sent, told)

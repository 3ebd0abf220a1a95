"""A worker whose engine guests and jobs share: a thread of its own steps it, from its making until it is closed.

Guests are let in by any thread (`llmbatch.runtime.online.guests`). Jobs stream their windows through the engine from
threads of their own, several at once, as if each had a worker to itself. What the engine dies of ends all; what a job's
sink or source raises ends that job.
"""

from __future__ import annotations

import threading
import time

from llmbatch.errors import RowError
from llmbatch.inference.answers.assembler import AnswerSink, FlushPolicy
from llmbatch.inference.sharing.stream_call import FetchedWindows, StreamCall
from llmbatch.inference.sharing.stream_calls import StreamCalls
from llmbatch.inference.window import Window
from llmbatch.inference.worker import Worker
from llmbatch.runtime.online.guests import Guest, GuestEnd, GuestInbox
from llmbatch.runtime.online.live_guests import NOTHING, EngineLoad
from llmbatch.runtime.protocols import Stop, Totals, WindowSource
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.beside.guests import Latency
from llmbatch.scheduler.output import FinishReason


class SharedWorker:
    """A worker that several threads use at once. The weights are loaded by the thread that steps, at once."""

    def __init__(self, worker: Worker, *, latency: Latency | None = None) -> None:
        """Start the thread. With a `latency` steps are bounded, so that guests wait no longer for a token."""
        self.worker = worker
        self._latency = latency
        self._inbox = GuestInbox()
        self._calls = StreamCalls(self._inbox)
        self._load = EngineLoad()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, guest: Guest) -> None:
        """Let a guest in, from any thread. Its listener is told of an end, whatever becomes of it."""
        if not self._inbox.put(guest):
            _refuse(guest)

    def leave(self, guest: Guest) -> None:
        """Say that nobody waits for a guest any more, from any thread: it is withdrawn, and its end is told."""
        self._inbox.leave(guest)

    def stream(
        self,
        windows: WindowSource[Window],
        sink: AnswerSink,
        *,
        at_risk: FlushPolicy | None = None,
        worker: Worker | None = None,
    ) -> Totals:
        """Answer every row of the windows beside all else, from any thread; see `Worker.stream`.

        `windows` are waited for on this thread; `sink` is called on the thread that steps. `worker` has made the
        windows, where it asks for something else (`Worker.asking`). Steps are those of the engine meanwhile.
        """
        worker = worker or self.worker
        fetched = FetchedWindows()
        call = StreamCall(fetched, worker.in_turns(fetched), worker.assembler(sink, at_risk))
        self._calls.add(call)
        try:
            fetched.fetch(windows, self._inbox)
            call.wait()
        except BaseException as error:  # of the source, or an interrupt
            self._calls.fail(call, error)
            call.wait()
        if call.error is not None:
            raise call.error
        return call.totals

    def stats(self) -> EngineLoad:
        """Tell how full the engine is."""
        return self._load

    @property
    def error(self) -> BaseException | None:
        """What ended the engine before it was closed, if anything did."""
        return self._error

    def close(self, grace: float = 0.0) -> None:
        """Let nobody in any more; what runs has `grace` seconds to end. Waits for the thread to end."""
        self._calls.close(time.monotonic() + grace)
        self._thread.join()

    def _run(self) -> None:
        try:
            stream: Stream[Window] = self.worker.open_stream(self._calls, inbox=self._inbox, latency=self._latency)
            self._load, self._calls.totals = stream.load, stream.totals
            stream.run(self._calls)
            self.worker.learn(stream)
        except Stop:
            pass
        except BaseException as caught:  # raised in the threads that wait for answers
            self._error = caught
        finally:
            for guest in self._inbox.refuse():
                _refuse(guest)
            self._calls.engine_ended(self._error)


def _refuse(guest: Guest) -> None:
    error = RowError("engine", "the engine was stopped before this request had begun")
    guest.listener.ended(GuestEnd(FinishReason.ERROR, NOTHING, 0, error=error))

"""Requests on their way to endpoints and back, on a thread of their own.

The thread that runs a job's windows writes answers to disks, which may take a while. So requests are sent by another
one, with an event loop. Requests stand in one line, in the order of their prompts. An endpoint takes the next ones from
it, a few neighbours at a time, whenever it may have more: so endpoints share a job by how fast they are, and neighbours
mostly meet at one endpoint, which has their common beginning. An endpoint that cannot be reached gives its requests
back after a few tries, if there is another one. It is left alone for a while then, and asked for one request at a time
until it answers again, or is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Generic

from llmbatch.remote.endpoint import R, RemoteEndpoint, S, Unreachable, unreachable
from llmbatch.remote.retries import Patience

_TOGETHER = 16  # neighbours that one endpoint takes at most
_SHARES = 4  # of the line that is left, what an endpoint takes at most, over the number of endpoints


class _Ended:
    """The end of a request, of which all was told."""


class Exchange(Generic[S, R]):
    """Sends requests, and hands back what is told of them. A context: at its end nothing is in flight."""

    def __init__(self, endpoints: Sequence[RemoteEndpoint[S, R]], patience: Patience) -> None:
        self.pending = 0  # requests that were put and have not ended
        self._endpoints, self._patience = endpoints, patience
        for endpoint in endpoints:
            endpoint.has_others = len(endpoints) > 1
        self._line: deque[S] = deque()
        self._received: queue.SimpleQueue[tuple[S, R] | _Ended | BaseException] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sends = True
        self._put = self._sent = 0  # requests; what is given back was not sent
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="endpoints", daemon=True)

    def __enter__(self) -> Exchange[S, R]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sends = False
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Requests that no endpoint has."""
        return self._put - self._sent

    @property
    def limit(self) -> int:
        """Requests that all endpoints may have at once now."""
        return sum(endpoint.concurrency.limit for endpoint in self._endpoints)

    def put(self, requests: Iterable[S]) -> None:
        """Send requests, behind those that wait."""
        added = list(requests)
        self.pending += len(added)
        self._put += len(added)
        self._loop.call_soon_threadsafe(self._add, added)

    def take(self, timeout: float) -> list[tuple[S, R]]:
        """Take what was told; wait up to `timeout` seconds for the first. Raises what ends the job."""
        taken: list[tuple[S, R]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._received.get(timeout=timeout) if timeout else self._received.get_nowait()
                timeout = 0.0
                if isinstance(item, BaseException):
                    if not taken:
                        raise item
                    self._received.put(item)  # raised when the answers before it are taken
                    break
                if isinstance(item, _Ended):
                    self.pending -= 1
                else:
                    taken.append(item)
        return taken

    def stop_sending(self) -> None:
        """Send nothing more; what is in flight may end."""
        self._sends = False

    @property
    def in_flight(self) -> int:
        """Requests that endpoints have."""
        return sum(endpoint.in_flight for endpoint in self._endpoints)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._main())
            except BaseException as error:  # raised in the thread that takes answers
                self._received.put(error)

    async def _main(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.open()
        self._fill()
        await self._end.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for endpoint in self._endpoints:
            await endpoint.close()

    def _add(self, requests: list[S]) -> None:
        self._line.extend(requests)
        self._fill()

    def _fill(self) -> None:
        """Let every endpoint have as many requests as it may."""
        for endpoint in sorted(self._endpoints, key=lambda one: one.rests):  # those first that answer
            if endpoint.lost is not None or endpoint.is_resting:
                continue
            while self._sends and endpoint.in_flight < (1 if endpoint.rests else endpoint.concurrency.limit):
                if not endpoint.held:
                    self._hold(endpoint)
                if not endpoint.held:
                    break
                endpoint.in_flight += 1
                self._sent += 1
                endpoint.concurrency.started()
                task = self._loop.create_task(self._answer(endpoint, endpoint.held.popleft()))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _hold(self, endpoint: RemoteEndpoint[S, R]) -> None:
        """Give an endpoint the next neighbours: few where few are left, so that endpoints end together."""
        share = len(self._line) // (_SHARES * len(self._endpoints))
        for _ in range(min(len(self._line), max(1, min(_TOGETHER, share)))):
            endpoint.held.append(self._line.popleft())

    async def _answer(self, endpoint: RemoteEndpoint[S, R], sent: S) -> None:
        try:
            await endpoint.answer(sent, self._patience, partial(self._tell, endpoint))
            self._received.put(_Ended())
        except Unreachable as error:
            self._give_back(endpoint, sent, error)
        except Exception as error:
            self._received.put(error)
        finally:
            endpoint.in_flight -= 1
        self._fill()

    def _tell(self, endpoint: RemoteEndpoint[S, R], sent: S, told: R) -> None:
        endpoint.answered()
        self._received.put((sent, told))

    def _give_back(self, endpoint: RemoteEndpoint[S, R], sent: S, error: Unreachable) -> None:
        """Ask an endpoint nothing for a while, or nothing more; the others answer what it was to."""
        if not (error.for_now and self._rest(endpoint)):
            endpoint.lost = endpoint.lost or error
            if all(one.lost for one in self._endpoints):
                self._received.put(unreachable(endpoint.url, error))
        self._sent -= 1
        self._line.extendleft((sent, *reversed(endpoint.held)))
        endpoint.held.clear()

    def _rest(self, endpoint: RemoteEndpoint[S, R]) -> bool:
        """Leave an endpoint alone for longer and longer; tells False where it has been tried often enough."""
        if endpoint.is_resting:
            return True
        tries = self._patience.connect_tries + endpoint.rests
        if tries >= self._patience.tries:
            return False
        endpoint.rests += 1
        endpoint.is_resting = True
        self._loop.call_later(self._patience.wait(tries, None), self._wake, endpoint)
        return True

    def _wake(self, endpoint: RemoteEndpoint[S, R]) -> None:
        endpoint.is_resting = False
        self._fill()

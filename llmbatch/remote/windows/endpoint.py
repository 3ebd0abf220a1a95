"""An endpoint of llmbatch, to which rows are sent in windows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import JobError
from llmbatch.inference.options import Options
from llmbatch.inference.window import Window
from llmbatch.remote.concurrency import Concurrency
from llmbatch.remote.endpoint import RemoteEndpoint, Unreachable, reason_of
from llmbatch.remote.replies import message_of, refused_key, retry_after
from llmbatch.remote.retries import Patience
from llmbatch.remote.windows.messages import ANSWERS, END, ERROR, HEAD, PATH, FrameReader, read_rows, write_window

AT_ONCE = 2  # windows: the next one is there before the last one has ended


@dataclass(slots=True, eq=False)
class Piece:
    """Rows of a window that are sent together: those that have no answer yet."""

    window: Window
    rows: NDArray[np.int32]
    is_known: bool = False  # what an endpoint tells of them when it has planned them was told


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """What an endpoint tells of rows when it has planned them."""

    duplicates: int
    unique_tokens: int
    notes: tuple[str, ...]


class _Broken(Exception):
    """An answer ended before all rows had theirs."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after  # seconds to wait, where the endpoint says so


class WindowEndpoint(RemoteEndpoint[Piece, PlannedRows | pa.RecordBatch]):
    """One endpoint, and what it is asked of rows."""

    def __init__(self, url: str, key: str | None, options: Options) -> None:
        super().__init__(url, key, Concurrency(start=AT_ONCE, most=AT_ONCE))
        self._options = options

    async def answer(
        self, sent: Piece, patience: Patience, tell: Callable[[Piece, PlannedRows | pa.RecordBatch], None]
    ) -> None:
        """Have rows answered; after a break only those are sent again that have no answer."""
        tries = unreached = 0
        while len(sent.rows):
            before, after = len(sent.rows), None
            try:
                await self._ask(sent, tell)
                continue
            except _Broken as error:
                reason, after, unreached = str(error), error.after, 0
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                reason, unreached = f"it cannot be reached ({reason_of(error)})", unreached + 1
            except httpx.RequestError as error:
                reason, unreached = f"it hung up ({reason_of(error)})", 0
            tries = tries + 1 if len(sent.rows) == before else 1
            if unreached:
                self.failed(reason)
            if self.lost is not None or tries >= patience.tries:
                raise Unreachable(f"{reason}, {tries} times in a row")
            if self.gives_back(unreached, patience):
                raise Unreachable(reason, for_now=True)
            await asyncio.sleep(patience.wait(tries, after))

    async def _ask(self, sent: Piece, tell: Callable[[Piece, PlannedRows | pa.RecordBatch], None]) -> None:
        """Send rows, and tell of each frame of the answer. Raises _Broken where rows stay without answers."""
        rows, window = sent.rows, sent.window
        data = await asyncio.to_thread(
            write_window, self._options, window.table.take(pa.array(rows)), window.keys[rows]
        )
        frames = FrameReader()
        async with self._client.stream("POST", PATH, content=data) as reply:
            if reply.status_code != 200:
                await reply.aread()
                raise _refusal(self.url, reply)
            async for piece in reply.aiter_raw():
                for kind, content in frames.read(piece):
                    if kind == HEAD and not sent.is_known:
                        sent.is_known = True
                        tell(sent, _planned(json.loads(content)))
                    elif kind == ANSWERS:
                        self._tell_rows(sent, rows, content, tell)
                    elif kind == ERROR:
                        raise JobError(f"the endpoint {self.url} ended: {content.decode(errors='replace')}")
                    elif kind == END and len(sent.rows):
                        raise _Broken(f"it left {len(sent.rows)} rows without an answer")
        if len(sent.rows):
            raise _Broken("it hung up in the middle of an answer")

    @staticmethod
    def _tell_rows(
        sent: Piece,
        rows: NDArray[np.int32],
        content: bytes,
        tell: Callable[[Piece, PlannedRows | pa.RecordBatch], None],
    ) -> None:
        """Tell of answers, whose rows are those of what was sent, under the numbers that they have in the window."""
        schema = sent.window.schema.rows
        try:
            batches = list(read_rows(content))
        except (pa.ArrowException, OSError) as error:
            raise _Broken(f"its answers cannot be read ({reason_of(error)})") from None
        for batch in batches:
            if batch.schema.names != schema.names:
                raise _Broken(f"its answers have other columns: {', '.join(batch.schema.names)}")
            numbers = batch["row"].to_numpy()
            wanted = np.flatnonzero(np.isin(rows, sent.rows))
            if len(np.intersect1d(numbers, wanted)) < len(numbers):
                raise _Broken("it answered rows twice, or others than it was sent")
            of = rows[numbers]
            columns = [pa.array(of, pa.int32()), *batch.columns[1:]]
            sent.rows = np.setdiff1d(sent.rows, of)
            tell(sent, pa.RecordBatch.from_arrays(columns, schema=schema))


def _refusal(url: str, reply: httpx.Response) -> Exception:
    status, said = reply.status_code, message_of(reply.content)
    if status in (401, 403):
        return JobError(refused_key(url, status, said))
    if status in (408, 409, 425, 429) or status >= 500:
        return _Broken(f"it answered {status}: {said}", retry_after(reply.headers))
    return JobError(f"the endpoint {url} refused a window ({status}): {said}")


def _planned(told: Any) -> PlannedRows:
    return PlannedRows(int(told["duplicates"]), int(told["unique_tokens"]), tuple(map(str, told["notes"])))

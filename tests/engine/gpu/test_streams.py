"""What is queued on a device's streams, and in what order, as far as a card that is not there allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from llmbatch.engine.gpu.execution import StreamLane
from llmbatch.engine.gpu.graphs.recorder import GraphRecorder
from llmbatch.engine.ranks.gpu.collectives import DeviceCollectives
from llmbatch.engine.ranks.gpu.meeting import Meeting
from llmbatch.engine.weights.host_layers import CopyStream
from llmbatch.kernels.triton.side_stream import SideStream

CARD = torch.device("cuda", 0)


class Card:
    """Notes what streams are asked to do."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = Stream(self, "products")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def queue(self, what: str) -> torch.Tensor:
        self.log.append(f"{self.now.name}: {what}")
        return torch.zeros(1)


class Stream:
    def __init__(self, card: Card, name: str) -> None:
        self.card, self.name = card, name

    def wait_stream(self, other: Stream) -> None:
        self.card.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.card.log.append(f"the host waits for {self.name}")

    def wait_event(self, event: Event) -> None:
        self.card.log.append(f"{self.name} waits for what {event.after} had")


class Event:
    after = ""

    def record(self, stream: Stream) -> None:
        self.after = stream.name


class Graph:
    """What `torch.cuda.CUDAGraph` is, as far as it is used."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    here = Card()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: Stream(here, f"beside {priority}"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: here.now)
    monkeypatch.setattr(torch.cuda, "stream", here.on)
    return here


def test_attention_is_queued_behind_products_and_products_behind_it(card: Card) -> None:
    _, join = StreamLane(CARD).begin(lambda: card.queue("attention"))
    card.queue("the other half's products")
    join()
    card.queue("products")
    assert card.log == [
        "beside -1 waits for products",
        "beside -1: attention",
        "products: the other half's products",
        "products waits for what beside -1 had",
        "products: products",
    ]


def test_a_graph_is_recorded_after_a_first_run_and_shares_the_memory_of_others(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[tuple[Graph, str | None]] = []

    @contextmanager
    def recording(graph: Graph, pool: str | None) -> Iterator[None]:
        graphs.append((graph, pool))
        with card.on(Stream(card, "recording")):
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "graph", recording)
    recorder = GraphRecorder()
    repeat = recorder.record(lambda: card.log.append(f"{card.now.name}: work"))
    assert card.log == [
        "beside 0 waits for products",
        "beside 0: work",
        "products waits for beside 0",
        "recording: work",
    ]
    repeat()
    recorder.record(lambda: None)
    assert [(graph.replays, pool) for graph, pool in graphs] == [(1, "pool"), (0, "pool")]


def test_the_allocator_is_told_of_a_recording_that_failed(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []

    @contextmanager
    def recording(graph: Graph, pool: str) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: told.append(given), raising=False)
    calls = iter([None, RuntimeError("operation not permitted when stream is capturing")])

    def work() -> None:
        error = next(calls)
        if error is not None:
            raise error

    with pytest.raises(RuntimeError, match="not permitted"):
        GraphRecorder().record(work)
    assert told == [(1, "pool")]


def test_what_runs_beside_begins_after_what_is_queued_and_ends_before_what_follows(card: Card) -> None:
    SideStream(CARD).run(lambda: card.log.append("here"), lambda: card.log.append(f"{card.now.name}: there"))
    assert card.log == [
        "beside -1 waits for what products had",
        "beside -1: there",
        "here",
        "products waits for what beside -1 had",
    ]


def test_memory_is_locked_on_its_device_and_let_go_of_when_it_was_copied(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        card.log.append(f"begin {device}")
        yield
        card.log.append("end")

    def lock(_: int, size: int, __: int) -> int:
        card.log.append(f"lock {size}")
        return 0

    driver = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=lambda _: card.log.append("unlock"))
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    source = torch.zeros(8, dtype=torch.uint8)
    CopyStream(torch.device("cuda", 1)).lock(source)
    del source
    assert card.log == ["begin cuda:1", "lock 8", "end", "the host waits for beside 0", "unlock"]


def test_memory_that_nothing_uses_is_given_back_before_a_group_takes_its_own(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: card.log.append("give back"))
    monkeypatch.setattr(Meeting, "join", lambda *_: card.log.append("join"))
    DeviceCollectives(0, 2).join(Meeting(), CARD)
    assert card.log == ["give back", "join"]

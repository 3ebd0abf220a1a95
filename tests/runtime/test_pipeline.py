"""Steps that are decided while the one before is computed give the same answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.engine.model.outline import KVType
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.loops.pipelined_loop import PipelinedLoop
from llmbatch.runtime.loops.step_loop import EngineDied, SerialLoop, StepLoop
from llmbatch.runtime.protocols import EngineObserver
from llmbatch.scheduler.admission_order import Blend
from llmbatch.scheduler.output import FinishReason, Step, StepResult
from llmbatch.scheduler.scheduler import FinishedSequences, QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import FixedBudget
from tests.support.examples import seeds
from tests.support.workloads import RATES, Believed, Workload

VOCABULARY, EOS, BROKEN = 50, 7, 11  # a sequence ends at EOS; at BROKEN its next logits are no numbers
PAGE = 4


class Rule:
    """Stands where a model does: the next token follows from the last one and its position."""

    def __call__(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, **_: Any
    ) -> Any:
        last, at = input_ids[0][logits_to_keep].long(), position_ids[0][logits_to_keep].long()
        logits = torch.nn.functional.one_hot((last * 31 + at * 17 + 5) % VOCABULARY, VOCABULARY).float()
        logits[last == BROKEN] = float("nan")
        return SimpleNamespace(logits=logits[None])


class Pipelined(GpuEngine):
    """Notes how many steps are queued, and fails where it is told to."""

    deepest = 0
    fails_at = -1

    def submit(self, step: Step) -> StepResult | None:
        if step.index == self.fails_at:
            raise RuntimeError("no")
        result = super().submit(step)
        self.deepest = max(self.deepest, len(self._queue))
        return result


class Notes(EngineObserver[Any]):
    """Takes answers; asks for some requests to be withdrawn once they have run for a while."""

    def __init__(self, engine: GpuEngine, slow: set[int]) -> None:
        self.answers: dict[int, tuple[list[int], int, int]] = {}  # tokens, reason, tokens as counted
        self.engine, self.slow = engine, slow
        self.steps = 0

    def before_step(self, step: Step) -> None:
        self.steps += 1

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        columns = (finished.requests, finished.slots, finished.reasons, finished.generated)
        for request, slot, reason, generated in zip(*(column.tolist() for column in columns), strict=True):
            assert request not in self.answers
            self.answers[request] = (self.engine.pop_tokens(slot).tolist(), reason, generated)
        late = [request for request in self.slow if self.steps > 12 and request not in self.answers]
        return np.array(late, np.int32)


def ruling_engine(num_pages: int) -> Pipelined:
    """An engine that says what `Rule` does."""
    untyped: Any = Rule()
    loaded = LoadedModel(
        module=untyped, config=untyped, eos_token_ids=(EOS,), dtype=torch.float32, kv_type=KVType("float32", 4),
        device=torch.device("cpu"), context_length=64, attention={}, notes=(),
    )  # fmt: skip  # arguments in groups
    nothing: Any = None
    return Pipelined(loaded, nothing, num_pages=num_pages, page_size=PAGE)


def run(
    seed: int,
    pipelined: bool,
    slow: set[int],
    steps: int,
    fails_at: int = -1,
    each: int = 0,
    begun: dict[int, list[int]] | None = None,
) -> tuple[Notes, Scheduler]:
    """Run 40 requests; one in `each` asks for more than a token of its logits, 0: none. Some answers have `begun`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, 40).astype(np.int32)
    rows = [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
    limits = rng.integers(1, 30, len(rows)).astype(np.int32)
    requests = RequestBatch(
        tokens=np.concatenate([np.array(row, np.int32) for row in rows]),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        max_tokens=limits,
        params_index=(np.arange(len(rows)) % each == 1).astype(np.int32) if each else np.zeros(len(rows), np.int32),
        params=(SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, presence_penalty=1.5)),
        serial=np.arange(len(rows), dtype=np.uint64),
        recorded=limits,
    )
    if begun:
        starts = [np.array(tokens, np.int32) for tokens in begun.values()]
        requests = requests.going_on(np.array(list(begun), np.int32), starts)
        rows = [row + begun.get(i, []) for i, row in enumerate(rows)]
        lengths = requests.prompt_lengths
    believed = np.ones(len(rows))
    scheduler = Scheduler(
        lengths, num_pages=22, trie=Workload(rows, limits, believed).trie(PAGE), lengths=Believed(believed),
        rates=RATES, max_running=9,
    )  # fmt: skip  # arguments in groups
    order = np.arange(len(rows), dtype=np.int32)
    scheduler.enqueue(QueueUpdate(order, believed, Blend(0.1, 0.2), FixedBudget(16), compute=1.0, memory=1.0))
    engine = ruling_engine(22)
    engine.fails_at = fails_at
    engine.begin(requests)
    notes = Notes(engine, slow)
    loop: StepLoop = PipelinedLoop(engine, notes) if pipelined else SerialLoop(engine, notes)
    ended = []
    while not scheduler.done:
        ended.append(loop.run(scheduler, steps))
        scheduler.check()
    counted = {r: g for one in ended for r, g in zip(one.requests.tolist(), one.generated.tolist(), strict=True)}
    assert counted == {request: generated for request, (_, _, generated) in notes.answers.items()}
    assert engine.deepest == 1 + pipelined
    return notes, scheduler


@pytest.mark.parametrize("seed", seeds(2, 4))
@pytest.mark.parametrize("each", [0, 10])
@pytest.mark.parametrize("pipelined", [False, True])
def test_answers_that_have_begun_go_on(seed: int, each: int, pipelined: bool) -> None:
    plain, _ = run(seed, False, set(), 1000, each=each)
    cuts = {request: len(tokens) * (request % 4) // 4 for request, (tokens, _, _) in plain.answers.items()}
    begun = {request: plain.answers[request][0][:cut] for request, cut in cuts.items() if cut}
    on, _ = run(seed, pipelined, set(), 1000, each=each, begun=begun)
    assert {request: (why, counted + cuts[request]) for request, (_, why, counted) in on.answers.items()} == {
        request: (why, counted) for request, (_, why, counted) in plain.answers.items()
    }
    for request, (tokens, why, _) in on.answers.items():
        last = len(tokens) - (why == FinishReason.ERROR)  # which is any token
        assert tokens[:last] == plain.answers[request][0][:last]


@pytest.mark.parametrize(("seed", "steps"), [(0, 1000), (1, 1000), (2, 5), (3, 2)])
def test_answers_are_those_of_one_step_at_a_time(seed: int, steps: int) -> None:
    plain, scheduler = run(seed, False, set(), steps)
    ahead, _ = run(seed, True, set(), steps)
    assert ahead.answers == plain.answers
    assert len(plain.answers) == 40
    assert {reason for _, reason, _ in plain.answers.values()} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.ERROR,
    }
    assert all(len(tokens) == counted for tokens, _, counted in plain.answers.values())
    assert scheduler.preemptions > 0


@pytest.mark.parametrize(("seed", "each", "slow"), [(0, 2, set()), (1, 7, set()), (2, 13, {5, 9, 20}), (3, 5, {1})])
def test_steps_that_need_the_tokens_before_them_change_no_answer(seed: int, each: int, slow: set[int]) -> None:
    plain, ahead, others = (
        comparable(run(seed, pipelined, late, 1000, each=rows)[0])
        for pipelined, late, rows in ((False, set(), each), (True, slow, each), (True, set(), 0))
    )
    assert ahead == {request: plain[request] for request in ahead}
    assert len(ahead) >= 40 - len(slow)
    assert plain != others


def comparable(notes: Notes) -> dict[int, tuple[list[int], int]]:
    """The answers that are whole; of logits that are no numbers no token is chosen."""
    return {
        request: (tokens[:-1] if reason == FinishReason.ERROR else tokens, reason)
        for request, (tokens, reason, _) in notes.answers.items()
        if reason != FinishReason.TIMEOUT
    }


def test_what_is_withdrawn_has_no_answer_and_the_others_have_theirs() -> None:
    plain, _ = run(0, False, set(), 1000)
    ahead, _ = run(0, True, {0, 1, 2, 3, 4, 5}, 1000)
    withdrawn = {request for request, (_, reason, _) in ahead.answers.items() if reason == FinishReason.TIMEOUT}
    assert withdrawn
    assert withdrawn <= {0, 1, 2, 3, 4, 5}
    left = ahead.answers.keys() - withdrawn
    assert {request: ahead.answers[request] for request in left} == {r: plain.answers[r] for r in left}


def test_an_engine_that_fails_is_said_to_have_died() -> None:
    with pytest.raises(EngineDied) as caught:
        run(0, True, set(), 1000, fails_at=9)
    assert str(caught.value.__cause__) == "no"

"""The torch engine gives the answers of transformers, however its steps are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

import llmbatch.engine.cpu.engine
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.config import bytes_per_token
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.output import FinishReason, Step, StepResult
from llmbatch.system.borrowed_threads import borrow_threads
from tests.support.models import EOS, FAMILIES, PAD, tiny_model, tiny_model_folder

Prompt = list[int]
CORES: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]


def make_requests(prompts: list[Prompt], params: list[SamplingParams]) -> RequestBatch:
    return RequestBatch(
        tokens=np.concatenate([np.array(p, np.int32) for p in prompts]),
        offsets=np.concatenate(([0], np.cumsum([len(p) for p in prompts]))).astype(np.int64),
        max_tokens=np.array([p.max_tokens for p in params], np.int32),
        params_index=np.arange(len(params), dtype=np.int32),
        params=tuple(params),
        serial=np.arange(len(params), dtype=np.uint64),
        recorded=np.array([p.max_tokens for p in params], np.int32),
    )


class Driver:
    """Runs requests through an engine in small random steps, sharing pages of equal prefixes."""

    def __init__(
        self,
        engine: CpuEngine,
        prompts: list[Prompt],
        params: list[SamplingParams],
        *,
        page_size: int,
        num_pages: int,
        largest_chunk: int,
        preempt_every: int = 0,
        seed: int = 0,
    ) -> None:
        self.engine, self.page_size = engine, page_size
        self.rng = np.random.default_rng(seed)
        self.largest_chunk, self.preempt_every = largest_chunk, preempt_every
        self.known = [list(p) for p in prompts]
        self.computed = [0] * len(prompts)
        self.pages: list[list[int]] = [[] for _ in prompts]
        self.free = list(self.rng.permutation(num_pages))
        self.users = [0] * num_pages
        self.published: dict[tuple[int, ...], int] = {}
        self.width = -(-512 // page_size)
        self.shared = 0
        engine.begin(make_requests(prompts, params))

    def run(self) -> tuple[list[Prompt], list[FinishReason]]:
        prompts = [len(k) for k in self.known]
        live = list(self.rng.permutation(len(self.known)))
        finish = [FinishReason.RUNNING] * len(self.known)
        index = 0
        while live:
            step = self.decide(index, live)
            result = self.engine.execute(step)
            sampled = iter(zip(result.tokens, result.finished, strict=True))
            for row, count, sample in zip(step.requests, step.counts, step.samples, strict=True):
                self.computed[row] += int(count)
                if sample:
                    token, state = next(sampled)
                    self.known[row].append(int(token))
                    finish[row] = FinishReason(int(state))
            for row in [row for row in live if finish[row]]:
                live.remove(row)
                self.release(row)
                assert self.engine.pop_tokens(int(row)).tolist() == self.known[row][prompts[row] :]
            index += 1
            if self.preempt_every and index % self.preempt_every == 0 and live:
                self.release(self.rng.choice(live))
        return [known[p:] for known, p in zip(self.known, prompts, strict=True)], finish

    def decide(self, index: int, live: list[int]) -> Step:
        decodes = [r for r in live if self.computed[r] == len(self.known[r]) - 1 and self.computed[r]]
        others = [r for r in live if r not in decodes]
        rows = decodes + others[: int(self.rng.integers(1, 4))] if others else decodes
        tables = np.zeros((len(self.known), self.width), np.int32)
        counts = []
        for row in rows:
            if not self.computed[row]:
                self.share(row)
            left = len(self.known[row]) - self.computed[row]
            count = 1 if row in decodes else min(left, int(self.rng.integers(1, self.largest_chunk + 1)))
            end = self.computed[row] + count
            while len(self.pages[row]) * self.page_size < end:
                page = self.free.pop()
                self.users[page] += 1
                self.pages[row].append(page)
            for block in range(end // self.page_size):
                prefix = tuple(self.known[row][: (block + 1) * self.page_size])
                self.published.setdefault(prefix, self.pages[row][block])
            tables[row, : len(self.pages[row])] = self.pages[row]
            counts.append(count)
        starts = np.array([self.computed[r] for r in rows], np.int32)
        ends = starts + np.array(counts, np.int32)
        slots = np.array(rows, np.int32)
        samples = ends == [len(self.known[r]) for r in rows]
        return Step(index, len(decodes), slots, slots, starts, ends - starts, samples, tables)

    def share(self, row: int) -> None:
        tokens = self.known[row]
        while (len(self.pages[row]) + 1) * self.page_size < len(tokens):
            page = self.published.get(tuple(tokens[: (len(self.pages[row]) + 1) * self.page_size]))
            if page is None:
                break
            self.users[page] += 1
            self.pages[row].append(page)
        self.computed[row] = len(self.pages[row]) * self.page_size
        self.shared += self.computed[row]

    def release(self, row: int) -> None:
        for page in self.pages[row]:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)
                self.published = {k: v for k, v in self.published.items() if v != page}
        self.pages[row] = []
        self.computed[row] = 0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are not worth a second thread; `test_kernels` cuts work for several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    @cache
    def loaded(family: str) -> LoadedModel:
        return load_model(tiny_model_folder(tmp_path_factory.mktemp(family), family), dtype="float32", platform=HOST)

    return loaded


def some_prompts(seed: int = 0) -> list[Prompt]:
    """Twelve prompts of 1 to 61 tokens; eight share prefixes of 40 and of 17 tokens, two are equal."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, 256, 40).tolist()
    prompts = [prefix + rng.integers(0, 256, n).tolist() for n in (1, 5, 20, 21)]
    prompts += [prefix[:17] + rng.integers(0, 256, n).tolist() for n in (3, 16, 30)]
    prompts += [rng.integers(0, 256, n).tolist() for n in (1, 2, 16, 33)]
    return [*prompts, prompts[1]]


@cache
def truth(family: str, tokens: int = 14) -> list[Prompt]:
    model: Any = tiny_model(family)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=EOS, pad_token_id=PAD, max_new_tokens=tokens
    )
    answers = []
    for prompt in some_prompts():
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, do_sample=False)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def answers(loaded: LoadedModel, page_size: int, chunk: int, preempt_every: int = 0) -> tuple[list[Prompt], Driver]:
    engine = CpuEngine(loaded, num_pages=1200 // page_size + 30, page_size=page_size)
    params = [SamplingParams(max_tokens=14)] * len(some_prompts())
    driver = Driver(
        engine,
        some_prompts(),
        params,
        page_size=page_size,
        num_pages=1200 // page_size + 30,
        largest_chunk=chunk,
        preempt_every=preempt_every,
    )
    return driver.run()[0], driver


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_generate(load: Callable[[str], LoadedModel], family: str, page_size: int) -> None:
    got, driver = answers(load(family), page_size, chunk=7)
    assert got == truth(family)
    assert driver.shared > 0 or page_size == 64


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prompts_in_one_chunk_give_the_same_answers(load: Callable[[str], LoadedModel], family: str) -> None:
    got, _ = answers(load(family), page_size=4, chunk=10_000)
    assert got == truth(family)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_preempted_rows_are_recomputed_to_the_same_answers(load: Callable[[str], LoadedModel], family: str) -> None:
    got, _ = answers(load(family), page_size=16, chunk=40, preempt_every=7)
    assert got == truth(family)


def run_one(
    loaded: LoadedModel,
    params: list[SamplingParams],
    prompts: list[Prompt] | None = None,
    decode: Callable[[NDArray[np.int32]], str] | None = None,
    seed: int = 0,
    chunk: int = 50,
) -> tuple[list[Prompt], list[FinishReason]]:
    engine = CpuEngine(loaded, num_pages=200, page_size=16, decode=decode)
    prompts = prompts or some_prompts()[: len(params)]
    return Driver(engine, prompts, params, page_size=16, num_pages=200, largest_chunk=chunk, seed=seed).run()


def test_an_eos_token_ends_the_answer_and_is_kept(load: Callable[[str], LoadedModel]) -> None:
    loaded = load("llama")
    expected = truth("llama")[0]
    eos = expected[3]
    other = LoadedModel(
        module=loaded.module,
        config=loaded.config,
        eos_token_ids=(eos,),
        dtype=loaded.dtype,
        kv_type=loaded.kv_type,
        device=loaded.device,
        context_length=512,
        attention=loaded.attention,
        notes=(),
    )
    got, finish = run_one(other, [SamplingParams(max_tokens=14)])
    assert got == [expected[: expected.index(eos) + 1]]
    assert finish == [FinishReason.STOP]
    got, finish = run_one(other, [SamplingParams(max_tokens=14, ignore_eos=True)])
    assert got == [expected]
    assert finish == [FinishReason.LENGTH]


def test_a_stop_string_ends_the_answer_where_it_is_complete(load: Callable[[str], LoadedModel]) -> None:
    expected = truth("llama")[0]

    def decode(tokens: NDArray[np.int32]) -> str:
        return "".join(f"<{token}>" for token in tokens)

    stop = decode(np.array(expected[2:4]))
    got, finish = run_one(load("llama"), [SamplingParams(max_tokens=14, stop=("never", stop))], decode=decode)
    assert got == [expected[:4]]
    assert finish == [FinishReason.STOP]


def test_sampled_answers_do_not_depend_on_the_steps(load: Callable[[str], LoadedModel]) -> None:
    params = [SamplingParams(max_tokens=14, temperature=1.0)] * 4 + [
        SamplingParams(max_tokens=14, temperature=0.7, top_k=20, top_p=0.9, seed=seed) for seed in (5, 6)
    ]
    prompts = [some_prompts()[0]] * 6
    first, _ = run_one(load("qwen3"), params, prompts, seed=1, chunk=5)
    again, _ = run_one(load("qwen3"), params, prompts, seed=2, chunk=40)
    assert first == again
    assert len({tuple(answer) for answer in first}) == 6


def test_equal_seeds_give_equal_answers(load: Callable[[str], LoadedModel]) -> None:
    params = [SamplingParams(max_tokens=14, temperature=1.0, seed=3)] * 2
    got, _ = run_one(load("llama"), params, [some_prompts()[0]] * 2)
    assert got[0] == got[1]


def test_logits_that_are_not_finite_are_the_error_of_their_row_alone(tmp_path: Path) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, "llama"), dtype="float32", platform=HOST)
    poisoned, sound = 259, some_prompts()[1]
    assert poisoned not in sound
    with torch.no_grad():
        module: Any = loaded.module
        embedding = module.get_input_embeddings()
        module.lm_head.weight = torch.nn.Parameter(embedding.weight.clone(), requires_grad=False)
        embedding.weight[poisoned] = torch.nan
    got, finish = run_one(loaded, [SamplingParams(max_tokens=14)] * 2, [[poisoned, 1, 2], sound])
    assert finish[0] == FinishReason.ERROR
    assert finish[1] != FinishReason.ERROR
    assert got[1] == truth("llama")[1]


def test_an_engine_takes_other_requests_once_all_are_retired(load: Callable[[str], LoadedModel]) -> None:
    engine = CpuEngine(load("llama"), num_pages=100, page_size=16)
    params = [SamplingParams(max_tokens=14)]
    for row in (0, 2):
        prompts = [some_prompts()[row]]
        driver = Driver(engine, prompts, params, page_size=16, num_pages=100, largest_chunk=30)
        assert driver.run()[0] == [truth("llama")[row]]


@pytest.mark.skipif(CORES < 2, reason="there is no core to lend")
def test_threads_that_are_lent_compute_the_next_steps_until_they_are_given_back(
    load: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llmbatch.engine.cpu.engine, "_WORTH_THREADS", 0)
    engine, threads, lent = CpuEngine(load("llama"), num_pages=105, page_size=16), list[int](), {2: 1, 3: 1}
    execute = engine.execute

    def execute_with_lent_threads(step: Step) -> StepResult:
        borrow_threads(lent.get(step.index, 0))
        result = execute(step)
        threads.append(numba.get_num_threads())
        return result

    monkeypatch.setattr(engine, "execute", execute_with_lent_threads)
    params = [SamplingParams(max_tokens=14)] * len(some_prompts())
    driver = Driver(engine, some_prompts(), params, page_size=16, num_pages=105, largest_chunk=7)
    assert driver.run()[0] == truth("llama")
    assert threads[:5] == [1, 1, 2, 2, 1]


def test_bfloat16_agrees_with_transformers_in_bfloat16_on_most_first_tokens(tmp_path: Path) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, "llama"), dtype="bfloat16", platform=HOST)
    model = tiny_model("llama", dtype=torch.bfloat16)
    got, _ = run_one(loaded, [SamplingParams(max_tokens=1)] * 12)
    with torch.inference_mode():
        expected = [int(model(torch.tensor([p])).logits[0, -1].argmax()) for p in some_prompts()]
    agreed = sum(a == [b] for a, b in zip(got, expected, strict=True))
    assert agreed >= 10


def test_bytes_per_token_is_what_the_pages_take(load: Callable[[str], LoadedModel]) -> None:
    loaded = load("qwen3")
    engine = CpuEngine(loaded, num_pages=5, page_size=16)
    held = sum(memory.nbytes for memory in engine._pages.memory.values())
    assert bytes_per_token(loaded.attention.values(), loaded.kv_type) * 5 * 16 == held

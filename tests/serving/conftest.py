"""A model with a chat template, and an endpoint that answers with the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbatch.inference.worker import Worker
from tests.support.models import CHAT_TEMPLATE, tiny_model_folder
from tests.support.serving import Served, open_worker, served


@pytest.fixture(scope="session")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model with a chat template."""
    return tiny_model_folder(tmp_path_factory.mktemp("chatting"), "llama", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def worker(chatting: str) -> Worker:
    """What reads requests for it."""
    return open_worker(chatting)


@pytest.fixture
def echo(worker: Worker, tmp_path: Path) -> Iterator[Served]:
    """An endpoint that answers with the prompt."""
    with served(worker, tmp_path) as found:
        yield found

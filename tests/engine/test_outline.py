"""What a simulated job knows of a model without torch and transformers: the same as with them, or nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.outline import outline, shape_of
from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8
from llmbatch.preprocess.tokenization.loading import load_tokenizer, plain_tokenizer
from tests.support.models import CHAT_TEMPLATE, FAMILIES, tiny_model_folder

TEXTS = ["", "two words", "<bos>a<sep>b<eos>", "naïve\n\tünï 😀", " " * 9]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of a family, as its users have it."""
    return Path(tiny_model_folder(tmp_path_factory.mktemp("model"), request.param, chat_template=CHAT_TEMPLATE))


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", *(["int4"] if HAS_INT8 else [])])
def test_an_outline_says_what_the_description_says(folder: Path, dtype: Literal["bfloat16", "int8", "int4"]) -> None:
    known = outline(str(folder), dtype)
    if known is None:
        return
    described = describe_model(str(folder), dtype=dtype)
    assert shape_of(known) == shape_of(described)
    assert str(known.dtype) == str(described.dtype).removeprefix("torch.")
    assert (known.context_length, known.bytes_per_token) == (described.context_length, described.bytes_per_token)


def test_a_plain_tokenizer_gives_the_same_tokens(folder: Path) -> None:
    plain, whole = plain_tokenizer(str(folder), name="m"), load_tokenizer(str(folder), name="m")
    assert plain is not None
    assert plain.has_chat_template == whole.has_chat_template
    for special in (False, True):
        mine, theirs = plain.encode(TEXTS, special), whole.encode(TEXTS, special)
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        np.testing.assert_array_equal(mine.offsets, theirs.offsets)
    chat = [{"role": "user", "content": "hello"}]
    assert plain.render_chat(chat, {}) == whole.render_chat(chat, {})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny model that may be changed."""
    return Path(tiny_model_folder(tmp_path, "llama"))


def test_a_known_family_has_an_outline(llama: Path) -> None:
    assert outline(str(llama), "float32") is not None


@pytest.mark.parametrize("changes", [{"model_type": "mamba"}, {"head_dim": None}, {"quantization_config": {}}])
def test_what_the_config_does_not_tell_has_no_outline(llama: Path, changes: dict[str, Any]) -> None:
    edit(llama / "config.json", **changes)
    assert outline(str(llama), "float32") is None


@pytest.mark.parametrize(
    "changes", [{"add_bos_token": True}, {"tokenizer_class": "LlamaTokenizer"}, {"bos_token": "<new>"}]
)
def test_a_tokenizer_that_its_config_changes_is_not_plain(llama: Path, changes: dict[str, Any]) -> None:
    edit(llama / "tokenizer_config.json", **changes)
    assert plain_tokenizer(str(llama), name="m") is None


def test_a_simulated_job_imports_neither_torch_nor_transformers(llama: Path) -> None:
    program = (
        "import sys; from llmbatch.inference.options import Options; from llmbatch.inference.worker import Worker; "
        f"Worker.open(Options.build(model={str(llama)!r}, prompt='text', engine='simulated', dtype='float32')).cost; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "[]"

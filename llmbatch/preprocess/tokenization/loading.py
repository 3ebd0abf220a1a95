"""Loads the tokenizer of a model's folder: without transformers, which takes seconds to import, where that suffices."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from llmbatch.errors import ModelError
from llmbatch.preprocess.tokenization.tokenizer import FastTokenizer, SlowTokenizer, Tokenizer

_AS_IT_STANDS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that take tokenizer.json as it is
_PLAIN = {
    "backend",
    "bos_token",
    "chat_template",
    "clean_up_tokenization_spaces",
    "eos_token",
    "is_local",
    "local_files_only",
    "model_max_length",
    "pad_token",
    "tokenizer_class",
    "unk_token",
}


class PlainTokenizer(FastTokenizer):
    """A tokenizer read from `tokenizer.json` without transformers; chats and decoding load that."""

    def __init__(self, backend: Any, folder: str, name: str, *, has_chat_template: bool) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._folder, self._name = folder, name
        self._has_chat_template = has_chat_template

    @cached_property
    def _tokenizer(self) -> Any:
        whole = load_tokenizer(self._folder, name=self._name)
        assert isinstance(whole, SlowTokenizer)
        return whole._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder has one."""
        return self._has_chat_template

    def load_chats(self) -> None:
        """Load the tokenizer of transformers, which takes seconds."""
        _ = self._tokenizer


def plain_tokenizer(folder: str, *, name: str) -> PlainTokenizer | None:
    """Load a tokenizer whose config adds nothing to `tokenizer.json`; returns None for any other folder."""
    from tokenizers import Tokenizer as Backend

    try:
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
        backend: Any = Backend.from_file(str(Path(folder) / "tokenizer.json"))
    except Exception:  # tokenizers raises Exception itself; transformers says what is wrong
        return None
    if not isinstance(config, dict) or not set(config) <= _PLAIN or config.get("tokenizer_class") not in _AS_IT_STANDS:
        return None
    if not isinstance(config.get("chat_template"), str | None):  # one of several
        return None
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = {value for key, value in config.items() if key.endswith("_token")}
    if not all(isinstance(token, str) for token in named) or not named <= special:
        return None
    has_template = bool(config.get("chat_template")) or (Path(folder) / "chat_template.jinja").is_file()
    return PlainTokenizer(backend, folder, name, has_chat_template=has_template)


def load_tokenizer(folder: str, *, name: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer saved in a model's folder; `name` is what messages call the model.

    Raises `ModelError` if the folder has none or it cannot be loaded.
    """
    name = name or folder
    if not any((Path(folder) / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelError(
            f"the model {name} has no tokenizer: expected tokenizer.json or tokenizer_config.json "
            f"in {folder}, save one there with AutoTokenizer.save_pretrained"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # files of any origin: each of transformers' loaders has errors of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"the tokenizer of {name} in {folder} cannot be loaded: {reason}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(f"the tokenizer of {name} in {folder} has no vocabulary: copy tokenizer.json there too")
    return FastTokenizer(tokenizer, name) if tokenizer.is_fast else SlowTokenizer(tokenizer, name)

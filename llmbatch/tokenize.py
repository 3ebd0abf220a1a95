"""Prompt texts to token columns and tokens back to text: the seam, and transformers behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import ModelError

_BATCH_TEXTS = 1000  # texts whose tokens are Python lists at one time
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """The tokens of `n` texts: one flat buffer and offsets."""

    tokens: NDArray[np.int32]  # [total tokens]
    offsets: NDArray[np.int64]  # [n + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def to_arrow(self) -> pa.Array:
        """The same buffer as `list<int32>`, or `large_list<int32>` beyond 2**31 - 1 tokens."""
        values = pa.array(self.tokens)
        if self.offsets[-1] > _INT32_MAX:
            return pa.LargeListArray.from_arrays(pa.array(self.offsets), values)
        return pa.ListArray.from_arrays(pa.array(self.offsets.astype(np.int32)), values)


class Tokenizer(Protocol):
    """Turns texts into tokens and back as one model wants it."""

    @property
    def name(self) -> str:
        """What people call the model."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` has a template to work with."""
        ...

    def encode(self, texts: Sequence[str], special_tokens: bool) -> TokenColumn:
        """The tokens of each text; with `special_tokens`, those that the model puts around a text too."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, object]], kwargs: Mapping[str, object]) -> str:
        """The text of one chat, special tokens included; raises whatever the template raises."""
        ...

    def decode(self, answers: Sequence[NDArray[np.int32]]) -> list[str]:
        """The exact text of each answer, without special tokens."""
        ...


class SlowTokenizer:
    """Any tokenizer of transformers, through its public calls."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name

    @property
    def name(self) -> str:
        """What people call the model."""
        return self._name

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template, or several of which one is the default."""
        template = self._tokenizer.chat_template
        return "default" in template if isinstance(template, dict) else bool(template)

    def encode(self, texts: Sequence[str], special_tokens: bool) -> TokenColumn:
        """The tokens of each text, encoded a batch at a time."""
        flat: list[NDArray[np.int32]] = []
        lengths = np.zeros(len(texts) + 1, np.int64)
        for start in range(0, len(texts), _BATCH_TEXTS):
            ids = self._ids(list(texts[start : start + _BATCH_TEXTS]), special_tokens)
            lengths[start + 1 : start + 1 + len(ids)] = [len(one) for one in ids]
            flat.append(np.fromiter(chain.from_iterable(ids), np.int32))
        return TokenColumn(np.concatenate(flat) if flat else np.empty(0, np.int32), np.cumsum(lengths))

    def render_chat(self, messages: Sequence[Mapping[str, object]], kwargs: Mapping[str, object]) -> str:
        """The text of one chat; raises whatever the template raises."""
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))

    def decode(self, answers: Sequence[NDArray[np.int32]]) -> list[str]:
        """The text of each answer, spaces as the tokens have them."""
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return [self._tokenizer.decode(answer.tolist(), **how) for answer in answers]

    def _ids(self, texts: list[str], special_tokens: bool) -> Sequence[Sequence[int]]:
        encoded = self._tokenizer(
            texts,
            add_special_tokens=special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids


class FastTokenizer(SlowTokenizer):
    """A tokenizer with a Rust backend, which encodes a batch on all cores."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        super().__init__(tokenizer, name)
        self._backend = tokenizer.backend_tokenizer
        # tokenizer.json may ask for both, and transformers switches them off in each call of its own
        self._backend.no_truncation()
        self._backend.no_padding()

    def _ids(self, texts: list[str], special_tokens: bool) -> Sequence[Sequence[int]]:
        encodings: Iterable[Any] = self._backend.encode_batch_fast(texts, add_special_tokens=special_tokens)
        return [encoding.ids for encoding in encodings]


def load_tokenizer(folder: str, *, name: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer saved in a model's folder; `name` is what messages call the model.

    Raises `ModelError` when the folder has none or it cannot be loaded.
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

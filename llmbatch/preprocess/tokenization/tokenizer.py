"""Prompt texts to token columns and tokens back to text: the `Tokenizer` protocol, implemented by transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.preprocess.tokenization.control_tokens import Controls, Spans
from llmbatch.preprocess.tokenization.respelled import Respelled
from llmbatch.preprocess.tokenization.token_bytes import REPLACED, bytes_in_words
from llmbatch.system.cancel_signal import NEVER, CancelSignal

_BATCH_TEXTS = 1000  # texts whose tokens are Python lists at one time
_BATCH_LETTERS = 2_000_000  # of these, so that a batch takes less than a second
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """The tokens of `n` texts: one flat buffer and offsets."""

    tokens: NDArray[np.int32]  # [total tokens]
    offsets: NDArray[np.int64]  # [n + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def to_arrow(self) -> pa.Array:
        """Return the same buffer as `list<int32>`, or `large_list<int32>` beyond 2**31 - 1 tokens."""
        values = pa.array(self.tokens)
        if self.offsets[-1] > _INT32_MAX:
            return pa.LargeListArray.from_arrays(pa.array(self.offsets), values)
        return pa.ListArray.from_arrays(pa.array(self.offsets.astype(np.int32)), values)


class Tokenizer(Protocol):
    """Turns texts into tokens and back for one model."""

    @property
    def name(self) -> str:
        """The model's name for people."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` has a template to work with."""
        ...

    def takes_tools(self, template: str | None = None) -> bool:
        """Tell whether a chat template, the usual one or that text or name, tells the model of tools."""
        ...

    @property
    def controls(self) -> Controls:
        """The model's control tokens: the special ones, and others that its chat template puts around messages."""
        ...

    def load_chats(self) -> None:
        """Load what chats need, where that has not been done."""
        ...

    def encode(
        self,
        texts: Sequence[str],
        special_tokens: bool,
        made: Mapping[int, Spans] = {},
        cancelled: CancelSignal = NEVER,
    ) -> TokenColumn:
        """Encode each text; with `special_tokens`, the model's special tokens are put around it too.

        `made` gives, for some texts, the spans of their control tokens: others in them are plain text. `cancelled`
        is checked at least about once a second.
        """
        ...

    def render_chat(self, messages: Sequence[Mapping[str, object]], kwargs: Mapping[str, object]) -> str:
        """Render one chat to text, special tokens included; raises whatever the template raises."""
        ...

    def decode(self, answers: Sequence[NDArray[np.int32]]) -> list[str]:
        """Decode each answer to its exact text, without special tokens."""
        ...

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token alone, of special ones too; of parts of characters their bytes, if known."""
        ...

    def serialise(self) -> str | None:
        """Return the whole tokenizer as JSON, as tokenizer.json has it; None where it has no such form."""
        ...


class SlowTokenizer:
    """Any tokenizer of transformers, through its public calls."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name

    @property
    def name(self) -> str:
        """The model's name for people."""
        return self._name

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template, or several with a default one."""
        template = self._tokenizer.chat_template
        return "default" in template if isinstance(template, dict) else bool(template)

    def takes_tools(self, template: str | None = None) -> bool:
        """Tell whether a chat template names `tools`; where there are several, one may be for them."""
        own = self._tokenizer.chat_template
        named: dict[str, str] = own if isinstance(own, dict) else {"default": own or ""}
        if template is None:
            template = "tool_use" if "tool_use" in named else "default"
        return re.search(r"\btools\b", named.get(template, template)) is not None

    def load_chats(self) -> None:
        """Load nothing: all is there."""

    @cached_property
    def controls(self) -> Controls:
        """The special tokens, and others that the chat template puts around plain messages."""
        special, others = self._added()
        if others and self.has_chat_template:
            written = self._plain_chat()
            special |= {text for text in others if text in written}
        return Controls(special, self._normalizer(special))

    def encode(
        self,
        texts: Sequence[str],
        special_tokens: bool,
        made: Mapping[int, Spans] = {},
        cancelled: CancelSignal = NEVER,
    ) -> TokenColumn:
        """Encode each text, a batch at a time."""
        flat: list[NDArray[np.int32]] = []
        lengths = np.zeros(len(texts) + 1, np.int64)
        for start, end in _batches(texts):
            cancelled.check()
            marked = [i for i in range(start, end) if i in made] if made else []
            batch = list(texts[start:end])
            for i in marked:
                batch[i - start] = ""
            ids = list(self._ids(batch, special_tokens))
            if marked:
                again = self._ids_apart([texts[i] for i in marked], [made[i] for i in marked], special_tokens)
                for i, one in zip(marked, again, strict=True):
                    ids[i - start] = one
            lengths[start + 1 : end + 1] = [len(one) for one in ids]
            flat.append(np.fromiter(chain.from_iterable(ids), np.int32))
        return TokenColumn(np.concatenate(flat) if flat else np.empty(0, np.int32), np.cumsum(lengths))

    def render_chat(self, messages: Sequence[Mapping[str, object]], kwargs: Mapping[str, object]) -> str:
        """Render one chat to text; raises whatever the template raises."""
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))

    def decode(self, answers: Sequence[NDArray[np.int32]]) -> list[str]:
        """Decode each answer, with spaces as the tokens have them."""
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return [self._tokenizer.decode(answer.tolist(), **how) for answer in answers]

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token alone."""
        how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return [self._tokenizer.decode([token], **how) for token in tokens]

    def serialise(self) -> str | None:
        """Return None: a tokenizer in Python has no such form."""
        return None

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

    def _ids_apart(self, texts: list[str], made: list[Spans], special_tokens: bool) -> list[list[int]]:
        """Encode as `_ids` does, but with control tokens at the spans of each text only."""
        return [self._ids_of_pieces(text, spans, special_tokens) for text, spans in zip(texts, made, strict=True)]

    def _ids_of_pieces(self, text: str, spans: Spans, special_tokens: bool) -> list[int]:
        ids: list[int] = []
        end = 0
        for begin, after in (*spans, (len(text), len(text))):
            if end < begin:
                tokens = self._tokenizer.tokenize(text[end:begin], split_special_tokens=True)
                ids += self._tokenizer.convert_tokens_to_ids(tokens)
            if begin < after:
                ids.append(self._tokenizer.convert_tokens_to_ids(text[begin:after]))
            end = after
        return self._tokenizer.build_inputs_with_special_tokens(ids) if special_tokens else ids

    def _added(self) -> tuple[set[str], set[str]]:
        """Return the texts of the special tokens, and of the other tokens that were added to the vocabulary."""
        added = self._tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(self._tokenizer.all_special_tokens)
        return special, {token.content for token in added} - special

    def _normalizer(self, special: set[str]) -> Callable[[str], str] | None:
        return None

    def _plain_chat(self) -> str:
        """Render messages without anything special in them."""
        said = ("user", "assistant", "user")
        try:
            return self.render_chat([{"role": role, "content": "a"} for role in said], {})
        except Exception:  # a chat template is a program of the model's author and may raise anything
            return ""


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

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token alone, or its bytes where it is only a part of a character."""
        texts = super().spell(tokens)
        for i, text in enumerate(texts):
            if REPLACED in text:
                texts[i] = bytes_in_words(self._backend.id_to_token(tokens[i])) or text
        return texts

    def serialise(self) -> str | None:
        """Return the whole tokenizer as JSON."""
        return str(self._backend.to_str())

    def _ids_apart(self, texts: list[str], made: list[Spans], special_tokens: bool) -> list[list[int]]:
        return self._respelled.encode(texts, made, special_tokens)

    @cached_property
    def _respelled(self) -> Respelled:
        return Respelled(self._backend, self.controls.texts, self._name)

    def _added(self) -> tuple[set[str], set[str]]:
        added = self._backend.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        return special, {token.content for token in added} - special

    def _normalizer(self, special: set[str]) -> Callable[[str], str] | None:
        """Return what a text goes through before the tokenizer looks for tokens that want normalised text."""
        normalizer = self._backend.normalizer
        added = self._backend.get_added_tokens_decoder().values()
        if normalizer is None or not any(token.normalized for token in added if token.content in special):
            return None
        normalize: Callable[[str], str] = normalizer.normalize_str
        return normalize


def _batches(texts: Sequence[str]) -> Iterable[tuple[int, int]]:
    """Yield bounds of batches of so many texts, or of so many letters."""
    start = letters = 0
    for end, text in enumerate(texts):
        if end > start and (end - start == _BATCH_TEXTS or letters + len(text) > _BATCH_LETTERS):
            yield start, end
            start, letters = end, 0
        letters += len(text)
    if texts:
        yield start, len(texts)

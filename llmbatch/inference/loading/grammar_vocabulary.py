"""A model's vocabulary as llguidance takes it: the bytes of each token, which are special, and how text is spelled.

llguidance reads a tokenizer by itself, too. But then it spells text that a form forces as the tokenizer does by
default, with special tokens where their names stand in the text. No answer may hold those, so that such a form could
not be followed.

Some tokenizers (of Llama 2, Mistral, Phi-3) put a space before a text. What a form forces stands behind other text and
gets none. So it is spelled behind a character, whose tokens are left out.
"""

from __future__ import annotations

from typing import Any, Final, cast

_BEFORE: Final = ("", "\x02", "\n")  # the first is taken behind which a text is spelled as it is


class _Spelling:
    """What llguidance asks of a tokenizer that it does not read by itself (`llguidance.TokenizerWrapper`).

    Raises ValueError where a text comes back as another one.
    """

    def __init__(self, read: Any, backend: Any) -> None:
        tokens = range(read.vocab_size)
        self.is_tokenizer_wrapper = True
        self.eos_token_id: int = read.eos_token
        self.bos_token_id = None
        self.tokens: list[bytes] = [read.decode_bytes([token]) for token in tokens]
        self.special_token_ids: list[int] = [token for token in tokens if read.is_special_token(token)]
        self._backend = backend
        for before in _BEFORE:
            self._before, self._left_out = before, len(self._ids(before))
            if b"".join(self.tokens[token] for token in self("a")) == b"a":
                return
        raise ValueError("it spells no text as it is")

    def __call__(self, text: str) -> list[int]:
        return self._ids(self._before + text)[self._left_out :]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


def grammar_vocabulary(tokenizer: str, size: int, ends: list[int]) -> Any:
    """Return a `llguidance.LLTokenizer` of a tokenizer's JSON, for a model of so many tokens.

    `ends` are the tokens that end an answer. Raises ValueError where llguidance does not read the tokenizer.
    """
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer)
    backend.encode_special_tokens = True  # as plain text
    given: dict[str, Any] = {"n_vocab": size, "eos_token": ends or None}
    return LLTokenizer(cast(Any, _Spelling(LLTokenizer(tokenizer, **given), backend)), **given)

"""A tokenizer whose control tokens are respelled, so that their usual texts are plain text to it.

It does all that the tokenizer does, but only the spans that the caller names become control tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable
from typing import Any

from llmbatch.errors import ModelError
from llmbatch.preprocess.tokenization.control_tokens import Spans


class Respelled:
    """A Rust tokenizer with control tokens that no text can spell."""

    def __init__(self, tokenizer: Any, controls: Collection[str], name: str) -> None:
        """Respell the control tokens of a tokenizer; `name` is what messages call the model.

        Raises ModelError if its tokenizer is of an unknown kind.
        """
        from tokenizers import Tokenizer

        secret = secrets.token_hex(8)
        description = json.loads(tokenizer.to_str())
        added = [token for token in description["added_tokens"] if token["content"] in controls]
        self._spelling = {token["content"]: f"\ufdd0{secret}-{token['id']}\ufdd1" for token in added}
        for token in added:
            token["content"] = self._spelling[token["content"]]
            token["normalized"] = False
        self._respell(description["model"])
        self._tokenizer = Tokenizer.from_str(json.dumps(description))
        ids = {text: tokenizer.token_to_id(text) for text in self._spelling}
        if any(self._tokenizer.token_to_id(self._spelling[text]) != number for text, number in ids.items()):
            raise ModelError(
                f"the tokenizer of {name} cannot tell control tokens from their texts, which some rows hold: "
                "drop these rows"
            )

    def encode(self, texts: Iterable[str], made: Iterable[Spans], special_tokens: bool) -> list[list[int]]:
        """Encode each text, with control tokens at its spans only."""
        respelled = [self._spell(text, spans) for text, spans in zip(texts, made, strict=True)]
        encodings = self._tokenizer.encode_batch_fast(respelled, add_special_tokens=special_tokens)
        return [encoding.ids for encoding in encodings]

    def _spell(self, text: str, spans: Spans) -> str:
        pieces: list[str] = []
        end = 0
        for begin, after in spans:
            pieces += (text[end:begin], self._spelling[text[begin:after]])
            end = after
        return "".join((*pieces, text[end:]))

    def _respell(self, model: dict[str, Any]) -> None:
        """Rename the control tokens in the vocabulary too: some kinds of tokenizer find any text in it."""
        names = self._spelling
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            pairs = ((merge.split(" ") if isinstance(merge, str) else merge, merge) for merge in model["merges"])
            model["merges"] = [merge for pair, merge in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]

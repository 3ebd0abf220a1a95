"""What form an answer must have: a grammar, given in one of several ways, and whether it can be followed.

Names are vLLM's (`structured_outputs`) and OpenAI's (`response_format`). Grammars are compiled by llguidance
(docs/decisions/0059), which is imported when the first one is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, cast, get_args

from llmbatch.arguments import json_fault, json_object, refusal, text
from llmbatch.errors import ParameterError

StructureKind = Literal["json", "regex", "choice", "grammar"]
_KINDS: Final[tuple[str, ...]] = (*get_args(StructureKind), "json_object")
_OF_A_SCHEMA: Final = ("name", "description", "schema", "strict")  # as OpenAI has it
_UNKNOWN: Final = "unknown special token"  # in errors of llguidance
_MOST_LETTERS: Final = 1 << 19  # of a form: half a second to compile; thrice as many take six times as long
_ANY_OBJECT: Final = '{"type": "object"}'
_PLAIN_WORDS: Final = {"NoExtensionBias": "no text can follow it"}  # for llguidance's


@dataclass(frozen=True, slots=True)
class Structure:
    """The form of an answer: a JSON schema, a regular expression, one of some texts (as JSON), or a grammar."""

    kind: StructureKind
    text: str

    @classmethod
    def of(cls, value: object) -> Structure:
        """Read the form that a caller gives: a mapping with one of `json`, `regex`, `choice`, `grammar`, `json_object`.

        Raises ParameterError. A schema is a mapping, its JSON text, or a class of pydantic.
        """
        if isinstance(value, Structure):
            return value
        if not isinstance(value, Mapping):
            raise refusal("structured_outputs", f"be a mapping with one of {', '.join(_KINDS)}", value)
        given = {name: one for name, one in value.items() if one is not None}
        if len(given) != 1 or next(iter(given)) not in _KINDS:
            raise refusal("structured_outputs", f"have one of {', '.join(_KINDS)}", dict(given))
        [(name, asked)] = given.items()
        if name == "json":
            return cls("json", _schema("structured_outputs['json']", asked))
        if name == "json_object":
            if asked is not True:
                raise refusal("structured_outputs['json_object']", "be true or be left out", asked)
            return cls("json", _ANY_OBJECT)
        if name == "choice":
            if not isinstance(asked, (list, tuple)) or not asked or not all(isinstance(one, str) for one in asked):
                raise refusal("structured_outputs['choice']", "be a list of at least one text", asked)
            return cls("choice", json.dumps(list(asked)))
        return cls(cast("StructureKind", name), text(f"structured_outputs[{name!r}]", asked))

    @classmethod
    def of_format(cls, value: object) -> Structure | None:
        """Read OpenAI's `response_format`; None for text. Raises ParameterError."""
        rule = "be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': {'schema': ...}}"
        if isinstance(value, type) and hasattr(value, "model_json_schema"):
            return cls("json", _schema("response_format", value))
        if not isinstance(value, Mapping):
            raise refusal("response_format", rule, value)
        given = {name: one for name, one in value.items() if one is not None}
        kind = given.pop("type", None)
        wrapped = given.pop("json_schema", None) if kind == "json_schema" else None
        if given:
            raise refusal("response_format", f"{rule}, without {', '.join(map(str, given))}", value)
        if kind == "text":
            return None
        if kind == "json_object":
            return cls("json", _ANY_OBJECT)
        if not isinstance(wrapped, Mapping) or wrapped.get("schema") is None:
            raise refusal("response_format", rule, value)
        unknown = [name for name in wrapped if name not in _OF_A_SCHEMA]
        if unknown:
            known = ", ".join(_OF_A_SCHEMA)
            raise refusal("response_format['json_schema']", f"have {known} alone", dict(wrapped))
        return cls("json", _schema("response_format['json_schema']['schema']", wrapped["schema"]))

    def grammar(self) -> str:
        """Write it as llguidance takes it. Raises ParameterError for what cannot be written so."""
        from llguidance import grammar_from

        kinds: dict[str, Any] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
        try:
            return str(grammar_from(kinds[self.kind], self.text))
        except ValueError as error:
            raise ParameterError(f"{self._name} must be a {self.kind} that can be read: {_line(error)}") from None

    def check(self, special: tuple[str, ...] | None = None) -> None:
        """Raise ParameterError where the form cannot be followed: it is malformed, or has something unsupported.

        `special` are the special tokens of the model, which a grammar may name; None: any name may be one.
        """
        fault = _fault(self, special)
        if fault:
            raise ParameterError(fault)

    @property
    def _name(self) -> str:
        return "the JSON schema" if self.kind == "json" else f"the {self.kind} of structured_outputs"


class _Bytes:
    """A tokenizer of single bytes and some special tokens, for `llguidance.LLTokenizer`."""

    def __init__(self, special: tuple[str, ...]) -> None:
        self.is_tokenizer_wrapper = True
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in special), b"<end>"]
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@lru_cache(4)
def _vocabulary(special: tuple[str, ...]) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(cast(Any, _Bytes(special)))


@lru_cache(1024)
def _fault(structure: Structure, special: tuple[str, ...] | None) -> str:
    """Say why a form cannot be followed; nothing where it can."""
    if len(structure.text) > _MOST_LETTERS:
        return (
            f"{structure._name} must have at most {_MOST_LETTERS:,} letters, got {len(structure.text):,}: "
            "shorten it, or ask for it in the prompt"
        )
    try:
        from llguidance import LLMatcher
    except ImportError:
        return "structured_outputs need llguidance, which is not installed: pip install 'llmbatch[structured]'"
    try:
        grammar = structure.grammar()
    except ParameterError as error:
        return str(error)
    # Its error would be that of any tokenizer's with the same special tokens.
    matcher = LLMatcher(_vocabulary(special or ()), grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some faults are found with the first token
    found = str(matcher.get_error()).partition("<state>")[0]  # behind it is what llguidance has in memory
    if special is None and _UNKNOWN in found:
        return ""
    return f"{structure._name} must be one that can be followed: {_line(found)}" if found else ""


def _schema(name: str, value: object) -> str:
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"{name} must be JSON: {json_fault(error)}") from None
    if isinstance(value, bool):
        return json.dumps(value)
    return json.dumps(json_object(name, value))  # in the order that it was given in, which is that of the answer


def _line(error: object) -> str:
    """Take what an error says in its first lines, on one, in plain words."""
    said = " ".join(str(error).split())[:300]
    return _PLAIN_WORDS.get(said, said)

"""Prompt texts of rows, from a column, a template or messages; a bad row becomes a row error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import pyarrow as pa

from llmbatch.arguments import flag, json_object, json_objects, text
from llmbatch.errors import DataError, ParameterError, RowError
from llmbatch.preprocess.chat import Message, MessagesError, parse_messages, parse_tools
from llmbatch.preprocess.chat_rendering import ChatRenderer, Prompt
from llmbatch.preprocess.columns import Unreadable, find_field, is_list, is_text, nested_values, text_values
from llmbatch.preprocess.template import Filled, Template, is_scalar
from llmbatch.preprocess.tokenization.control_tokens import Spans
from llmbatch.preprocess.tokenization.token_ids import holds_ids
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
from llmbatch.system.cancel_signal import NEVER, CancelSignal

_RESERVED_KWARGS = frozenset(
    ("conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text for each row that has one, and the error of each other row."""

    texts: list[str | None]
    errors: dict[int, RowError]  # by row
    chat: bool  # the texts are rendered chats, which bring their own special tokens
    made: dict[int, Spans] = field(default_factory=dict)  # by row: its control tokens, where the texts of others are


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Where the prompts of a table come from: exactly one of `prompt`, `template`, `messages` and `turns`.

    `prompt` is a column of text, or of lists of token ids, which are taken as they are. `template` is text with column
    names in braces, `"Q: {question}"`; `{{` and `}}` are braces, names may hold spaces and dots. `messages` is a column
    of message lists in OpenAI's format, as structs or as JSON text, and is always rendered by the model's chat
    template. `turns` is a column of lists of texts, the user messages of a chat that are answered in turn; the first is
    rendered here, and the others by `llmbatch.inference.conversations`. With `chat` the prompt or the filled template
    becomes one user message, rendered likewise; a `system` text goes before it or the first turn, and implies `chat`.
    `tools` are definitions in OpenAI's format for every chat, or the name of a column of lists of them, as structs or
    as JSON text; `chat_template_kwargs` are passed to the chat template too.
    Raises `ParameterError`.
    """

    prompt: str | None = None
    template: str | None = None
    messages: str | None = None
    turns: str | None = None
    chat: bool = False
    system: str | None = None
    tools: Sequence[Mapping[str, object]] | str | None = None
    chat_template_kwargs: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "template", "messages", "turns", "system"):
            if getattr(self, name) is not None:
                text(name, getattr(self, name))
        object.__setattr__(self, "chat", flag("chat", self.chat))
        if self.tools is not None and not (
            isinstance(self.tools, str) and not self.tools.lstrip().startswith(("[", "{"))
        ):
            object.__setattr__(self, "tools", json_objects("tools", self.tools))
        if self.chat_template_kwargs is not None:
            kwargs = json_object("chat_template_kwargs", self.chat_template_kwargs)
            object.__setattr__(self, "chat_template_kwargs", kwargs)
        given = [name for name in ("prompt", "template", "messages", "turns") if getattr(self, name) is not None]
        if len(given) != 1:
            there = " and ".join(given) or "none"
            raise ParameterError(f"exactly one of prompt, template, messages and turns must be given, got {there}")
        if self.messages is not None and (self.chat or self.system is not None):
            option = "chat" if self.chat else "system"
            raise ParameterError(
                f"{option} wraps a prompt or a template, but messages are chats already: leave {option} out"
            )
        if self.template is not None:
            Template.parse(self.template)
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) and not self.renders_chat:
                raise ParameterError(f"{name} need messages or chat: a raw prompt goes through no chat template")
        for key in self.chat_template_kwargs or ():
            if key in _RESERVED_KWARGS:
                raise ParameterError(f"chat_template_kwargs must not hold {key!r}: leave it to llmbatch")
        if self.tools is not None and "tools" in (self.chat_template_kwargs or ()):
            raise ParameterError("chat_template_kwargs must not hold 'tools' beside the option tools: give them once")

    @property
    def renders_chat(self) -> bool:
        """Whether prompts go through the model's chat template."""
        return self.chat or self.system is not None or self.messages is not None or self.turns is not None

    def columns(self) -> tuple[str, ...]:
        """Return the input columns that prompts are made from, each once."""
        named = () if self.template is None else Template.parse(self.template).columns
        tools = self.tools if isinstance(self.tools, str) else None
        return tuple(
            dict.fromkeys(name for name in (self.prompt, *named, self.messages, self.turns, tools) if name is not None)
        )

    def check(self, schema: pa.Schema) -> None:
        """Raise `DataError` if a column is missing or its type cannot give a prompt."""
        if self.prompt is not None:
            self._check_prompt(find_field(schema, self.prompt, "prompt").type)
        elif self.messages is not None:
            kind = find_field(schema, self.messages, "messages").type
            if not is_text(kind) and not _is_messages(kind) and not pa.types.is_null(kind):
                raise DataError(
                    "the messages column must hold lists of structs with a role and a content, "
                    f"or their JSON text, but {self.messages!r} is {kind}"
                )
        elif self.turns is not None:
            kind = find_field(schema, self.turns, "turns").type
            if not (is_list(kind) and (is_text(kind.value_type) or pa.types.is_null(kind.value_type))):
                raise DataError(f"the turns column must hold lists of texts, but {self.turns!r} is {kind}")
        for name in () if self.template is None else Template.parse(self.template).columns:
            kind = find_field(schema, name, "template").type
            if holds_ids(kind):
                raise DataError(
                    f"a template writes text, but {name!r} holds lists ({kind}): token ids are given as prompt, "
                    "without a template"
                )
            if not is_scalar(kind) and not pa.types.is_null(kind):
                raise DataError(f"a template column must hold text, numbers, booleans or times, but {name!r} is {kind}")
        if isinstance(self.tools, str):
            kind = find_field(schema, self.tools, "tools").type
            structs = is_list(kind) and (pa.types.is_struct(kind.value_type) or pa.types.is_null(kind.value_type))
            if not is_text(kind) and not structs and not pa.types.is_null(kind):
                raise DataError(
                    f"the tools column must hold lists of structs, or their JSON text, but {self.tools!r} is {kind}"
                )

    def _check_prompt(self, kind: pa.DataType) -> None:
        if holds_ids(kind):
            if self.renders_chat:
                raise DataError(
                    f"chat and system wrap a prompt of text, but {self.prompt!r} holds token ids ({kind}): "
                    "leave chat and system out"
                )
        elif not is_text(kind) and not pa.types.is_null(kind):
            way_out = f": the template '{{{self.prompt}}}' writes it as text" if is_scalar(kind) else ""
            raise DataError(
                f"the prompt column must be text or lists of token ids, but {self.prompt!r} is {kind}{way_out}"
            )

    def make_ready(self, tokenizer: Tokenizer) -> None:
        """Load what `render` needs of a tokenizer. Raises ModelError where no chat template has what is asked for."""
        if self.renders_chat:
            tokenizer.load_chats()
            self._renderer(tokenizer)
        elif self.template is not None:
            _ = tokenizer.controls  # where a chat template decides which they are, that is loaded

    def takes_ids(self, schema: pa.Schema) -> bool:
        """Tell whether the prompts of a table are token ids."""
        return self.prompt is not None and holds_ids(schema.field(self.prompt).type)

    def render(self, table: pa.Table, tokenizer: Tokenizer, cancelled: CancelSignal = NEVER) -> Rendered:
        """Render the prompt text of each row; a row that has none gets a `RowError`.

        What a template or a chat template writes may be control tokens, the values of a row are plain text; a raw
        prompt is taken as it is. `cancelled` is checked before each row. Raises what `check` raises, and
        `ModelError` if a chat template is needed and the model has none.
        """
        self.check(table.schema)
        renderer = self._renderer(tokenizer) if self.renders_chat else None
        rendered = Rendered([], {}, self.renders_chat)
        for row, (draft, tools) in enumerate(zip(self._drafts(table, tokenizer), self._tools(table), strict=True)):
            cancelled.check()
            if isinstance(tools, RowError) and not isinstance(draft, RowError):
                draft = tools
            elif renderer is not None and not isinstance(draft, RowError):
                assert not isinstance(tools, RowError)
                draft = renderer.render(self._conversation(draft), tools)
            if isinstance(draft, Prompt):
                rendered.texts.append(draft.text)
                if draft.made is not None:
                    rendered.made[row] = draft.made
            else:
                assert isinstance(draft, RowError)
                rendered.texts.append(None)
                rendered.errors[row] = draft
        return rendered

    def _drafts(self, table: pa.Table, tokenizer: Tokenizer) -> Iterator[Prompt | list[Message] | RowError]:
        """Yield the prompt of each row, before any chat template."""
        if self.prompt is not None:
            yield from map(_prompt, text_values(table[self.prompt]))
        elif self.template is not None:
            template = Template.parse(self.template)
            for filled in template.fill(table):
                yield filled if isinstance(filled, RowError) else _filled(template, filled, tokenizer)
        elif self.messages is not None:
            column = table[self.messages]
            yield from map(_messages, text_values(column) if is_text(column.type) else nested_values(column))
        elif self.turns is not None:
            for users in map(_users, nested_values(table[self.turns])):
                yield users if isinstance(users, RowError) else self._conversation(Prompt(users[0]))

    def _tools(self, table: pa.Table) -> Iterator[list[Message] | RowError | None]:
        """Yield the tools of each row that has some of its own."""
        if not isinstance(self.tools, str):
            return repeat(None, table.num_rows)
        column = table[self.tools]
        return map(_tools, text_values(column) if is_text(column.type) else nested_values(column))

    def _renderer(self, tokenizer: Tokenizer) -> ChatRenderer:
        tools = None if isinstance(self.tools, str) else self.tools
        return ChatRenderer(tokenizer, self.chat_template_kwargs, None if tools is None else [*map(dict, tools)])

    def _conversation(self, draft: Prompt | list[Message]) -> list[Message]:
        if not isinstance(draft, Prompt):
            return draft
        user = {"role": "user", "content": draft.text}
        return [user] if self.system is None else [{"role": "system", "content": self.system}, user]


def _prompt(value: object) -> Prompt | RowError:
    if isinstance(value, Unreadable):
        return RowError("encoding", f"prompt cannot be read: {value.reason}")
    if value is None:
        return RowError("null_prompt", "prompt is null")
    return Prompt(str(value)) if value else RowError("null_prompt", "prompt is empty")


def _filled(template: Template, filled: Filled, tokenizer: Tokenizer) -> Prompt | RowError:
    asked, controls = filled.text, tokenizer.controls
    found, hidden = controls.spans(asked), controls.hidden(asked)
    if found or hidden:
        made = template.written(filled.values, controls)
        if made != found or hidden:
            return Prompt(asked, made)
    return _prompt(asked)


def _messages(value: object) -> list[Message] | RowError:
    if isinstance(value, Unreadable):
        return RowError("encoding", f"messages cannot be read: {value.reason}")
    try:
        messages = parse_messages(value)
    except MessagesError as error:
        return RowError("messages", str(error))
    return RowError("null_prompt", "messages are null") if messages is None else messages


def _users(value: object) -> list[str] | RowError:
    if isinstance(value, Unreadable):
        return RowError("encoding", f"turns cannot be read: {value.reason}")
    if not isinstance(value, list) or not value:
        return RowError("null_prompt", f"turns are {'null' if value is None else 'empty'}")
    for place, text_ in enumerate(value):
        if not text_:
            return RowError("null_prompt", f"turns[{place}] is {'null' if text_ is None else 'empty'}")
    return value


def _tools(value: object) -> list[Message] | RowError | None:
    if isinstance(value, Unreadable):
        return RowError("encoding", f"tools cannot be read: {value.reason}")
    try:
        return parse_tools(value)
    except MessagesError as error:
        return RowError("messages", str(error))


def _is_messages(kind: pa.DataType) -> bool:
    if not is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    return {"role", "content"} <= {field.name for field in kind.value_type}

"""Rows to prompt texts, by column, template and messages."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.errors import DataError, ParameterError, RowError
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.template import Filled, Template
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
from tests.support.tokenizers import texts_of

# What a source may be


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "exactly one of prompt, template, messages and turns must be given, got none"),
        (
            {"prompt": "a", "messages": "b"},
            "exactly one of prompt, template, messages and turns must be given, got prompt and messages",
        ),
        (
            {"messages": "m", "chat": True},
            "chat wraps a prompt or a template, but messages are chats already: leave chat out",
        ),
        (
            {"messages": "m", "system": "Be brief."},
            "system wraps a prompt or a template, but messages are chats already: leave system out",
        ),
        (
            {"prompt": "p", "chat_template_kwargs": {"shout": True}},
            "chat_template_kwargs need messages or chat: a raw prompt goes through no chat template",
        ),
        (
            {"messages": "m", "chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs must not hold 'tokenize': leave it to llmbatch",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        PromptSource(**options)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Hello", "a template must name at least one column in braces, got 'Hello'"),
        ("{}", "a template holds plain column names in braces, got '{}': write {{ and }} for braces"),
        ("{a!r}", "a template holds plain column names in braces, got '{a!r}': write {{ and }} for braces"),
        ("{a:>5}", "a template holds plain column names in braces, got '{a:>5}': write {{ and }} for braces"),
        ("{a[0]}", "a template holds plain column names in braces, got '{a[0]}': write {{ and }} for braces"),
        (
            "{a",
            "a template needs balanced braces, got '{a' (expected '}' before end of string): "
            "write {{ and }} for braces",
        ),
        (
            "{a} }",
            "a template needs balanced braces, got '{a} }' (Single '}' encountered in format string): "
            "write {{ and }} for braces",
        ),
    ],
)
def test_a_template_of_anything_but_column_names_is_refused(template: str, text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        PromptSource(template=template)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("source", "columns"),
    [
        (PromptSource(prompt="p"), ("p",)),
        (PromptSource(messages="m"), ("m",)),
        (PromptSource(template="{b} {a} {b}"), ("b", "a")),
    ],
)
def test_a_source_names_the_columns_it_needs_once(source: PromptSource, columns: tuple[str, ...]) -> None:
    assert source.columns() == columns


# What its columns may be


@pytest.mark.parametrize(
    ("source", "schema", "text"),
    [
        (
            PromptSource(prompt="promt"),
            pa.schema({"prompt": pa.string(), "id": pa.int64()}),
            "the prompt column 'promt' is not in the input, whose columns are 'prompt', 'id'. Did you mean 'prompt'?",
        ),
        (
            PromptSource(template="{x}"),
            pa.schema({f"c{i}": pa.string() for i in range(22)}),
            "the template column 'x' is not in the input, whose columns are "
            + ", ".join(f"'c{i}'" for i in range(20))
            + " and 2 more",
        ),
        (
            PromptSource(messages="m"),
            pa.schema([]),
            "the messages column 'm' is not in the input, which has no columns",
        ),
        (
            PromptSource(prompt="p"),
            pa.schema([("p", pa.string()), ("p", pa.string())]),
            "the prompt column must be one, but 2 columns are named 'p': rename all but one",
        ),
        (
            PromptSource(prompt="id"),
            pa.schema({"id": pa.int64()}),
            "the prompt column must be text or lists of token ids, but 'id' is int64: "
            "the template '{id}' writes it as text",
        ),
        (
            PromptSource(prompt="ids"),
            pa.schema({"ids": pa.list_(pa.string())}),
            "the prompt column must be text or lists of token ids, but 'ids' is list<item: string>",
        ),
        (
            PromptSource(prompt="ids", system="Be brief."),
            pa.schema({"ids": pa.list_(pa.int32())}),
            "chat and system wrap a prompt of text, but 'ids' holds token ids (list<item: int32>): "
            "leave chat and system out",
        ),
        (
            PromptSource(template="{ids}"),
            pa.schema({"ids": pa.large_list(pa.uint16())}),
            "a template writes text, but 'ids' holds lists (large_list<item: uint16>): "
            "token ids are given as prompt, without a template",
        ),
        (
            PromptSource(template="{raw}"),
            pa.schema({"raw": pa.binary()}),
            "a template column must hold text, numbers, booleans or times, but 'raw' is binary",
        ),
        (
            PromptSource(messages="m"),
            pa.schema({"m": pa.list_(pa.struct({"role": pa.string(), "text": pa.string()}))}),
            "the messages column must hold lists of structs with a role and a content, or their JSON text, "
            "but 'm' is list<item: struct<role: string, text: string>>",
        ),
    ],
)
def test_a_column_that_is_missing_or_gives_no_prompt_is_refused(
    source: PromptSource, schema: pa.Schema, text: str, raw: Tokenizer
) -> None:
    with pytest.raises(DataError) as caught:
        source.check(schema)
    assert str(caught.value) == text
    with pytest.raises(DataError):
        source.render(schema.empty_table(), raw)


# Prompts and templates


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_a_prompt_is_the_text_of_its_row_and_a_null_or_empty_one_an_error(kind: pa.DataType, raw: Tokenizer) -> None:
    values = ["a {b}", None, "", "ü"]
    column = pa.array(values).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values, kind)
    assert texts_of(PromptSource(prompt="p"), pa.table({"p": column}), raw) == [
        "a {b}",
        RowError("null_prompt", "prompt is null"),
        RowError("null_prompt", "prompt is empty"),
        "ü",
    ]


def test_a_column_of_nothing_but_nulls_has_no_prompts(raw: Tokenizer) -> None:
    table = pa.table({"p": pa.nulls(1)})
    error = RowError("null_prompt", "prompt is null")
    assert texts_of(PromptSource(prompt="p"), table, raw) == [error]


def test_a_template_writes_every_scalar_as_python_does(raw: Tokenizer) -> None:
    when = datetime.datetime(2024, 5, 6, 7, 8, 9)
    table = pa.table(
        {
            "i": [1],
            "f": [0.5],
            "b": [True],
            "d": [when.date()],
            "t": pa.array([when], pa.timestamp("ns")),
            "n": [decimal.Decimal("1.50")],
            "s": pa.array(["x"]).dictionary_encode(),
        }
    )
    source = PromptSource(template="{i}|{f}|{b}|{d}|{t}|{n}|{s}")
    assert texts_of(source, table, raw) == ["1|0.5|True|2024-05-06|2024-05-06 07:08:09|1.50|x"]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32()])
def test_a_template_writes_narrow_floats_with_the_digits_that_they_have(kind: pa.DataType, raw: Tokenizer) -> None:
    numbers = pa.array([0.1, 1.0, -2.5, float("nan")]).cast(kind)
    table = pa.table({"x": numbers, "d": numbers.dictionary_encode()})
    expected = ["0.1|0.1", "1.0|1.0", "-2.5|-2.5", "nan|nan"]
    assert texts_of(PromptSource(template="{x}|{d}"), table, raw) == expected


def test_template_names_may_hold_spaces_and_dots_and_double_braces_are_braces(raw: Tokenizer) -> None:
    table = pa.table({"the question": ["Why?"], "meta.id": [7]})
    source = PromptSource(template="{{{meta.id}}} Q: {the question}\nA: {the question}")
    assert texts_of(source, table, raw) == ["{7} Q: Why?\nA: Why?"]


def test_a_null_in_a_template_column_is_an_error_that_names_it(raw: Tokenizer) -> None:
    table = pa.table({"a": ["x", "x", ""], "b": [1, None, 2]})
    assert texts_of(PromptSource(template="{a}{b}"), table, raw) == [
        "x1",
        RowError("template", "template needs column 'b', which is null in this row"),
        "2",
    ]


def test_a_template_that_comes_out_empty_is_an_empty_prompt(raw: Tokenizer) -> None:
    error = RowError("null_prompt", "prompt is empty")
    assert texts_of(PromptSource(template="{a}"), pa.table({"a": [""]}), raw) == [error]


@given(st.lists(st.tuples(st.text("ab{} ", max_size=4), st.sampled_from(["x", "y z"])), min_size=1, max_size=4))
def test_a_template_fills_as_str_format_does(parts: list[tuple[str, str]]) -> None:
    template = "".join(literal.replace("{", "{{").replace("}", "}}") + "{" + name + "}" for literal, name in parts)
    table = pa.table({"x": ["1", "{x}"], "y z": ["", "é"]})
    expected = [template.format(**row) for row in table.to_pylist()]
    filled = list(Template.parse(template).fill(table))
    assert [one.text for one in filled if isinstance(one, Filled)] == expected


# Values that Python cannot hold


def test_a_time_in_a_zone_that_is_not_known_here_is_an_error_of_its_row(raw: Tokenizer) -> None:
    kind = pa.timestamp("us", "Mars/Olympus")
    reason = "Python cannot hold this timestamp[us, tz=Mars/Olympus]"
    assert texts_of(PromptSource(template="{t}"), pa.table({"t": pa.array([0, None], kind)}), raw) == [
        RowError("template", f"template needs column 't', which cannot be written in this row: {reason}"),
        RowError("template", "template needs column 't', which is null in this row"),
    ]


def broken(kind: pa.DataType, *values: bytes) -> pa.Array:
    """Text of any bytes."""
    return pa.array(values, pa.large_binary() if pa.types.is_large_string(kind) else pa.binary()).view(kind)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_prompt_that_is_not_utf8_is_an_error_of_its_row(kind: pa.DataType, raw: Tokenizer) -> None:
    values = broken(pa.string() if pa.types.is_dictionary(kind) else kind, b"a", b"\xff", b"b")
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), values) if pa.types.is_dictionary(kind) else values
    reason = "it is not UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"
    table = pa.table({"p": column})
    assert texts_of(PromptSource(prompt="p"), table, raw) == [
        "a",
        RowError("encoding", f"prompt cannot be read: {reason}"),
        "b",
    ]
    assert texts_of(PromptSource(template="{p}"), table, raw) == [
        "a",
        RowError("template", f"template needs column 'p', which cannot be written in this row: {reason}"),
        "b",
    ]


def test_messages_that_are_not_utf8_are_an_error_of_their_row(chatty: Tokenizer) -> None:
    good = b'[{"role": "user", "content": "hi"}]'
    reason = "it is not UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"
    text = pa.table({"m": broken(pa.string(), good, b"\xff")})
    error = RowError("encoding", f"messages cannot be read: {reason}")
    assert texts_of(PromptSource(messages="m"), text, chatty) == ["<user>hi<assistant>", error]
    contents = broken(pa.string(), b"hi", b"\xff")
    message = pa.StructArray.from_arrays([pa.array(["user", "user"]), contents], ["role", "content"])
    structs = pa.table({"m": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), message)})
    assert texts_of(PromptSource(messages="m"), structs, chatty) == ["<user>hi<assistant>", error]


@pytest.mark.parametrize(
    ("kind", "near", "written", "far"),
    [
        (pa.timestamp("s"), 0, "1970-01-01 00:00:00", 2**55),
        (pa.timestamp("s", "Europe/Paris"), 0, "1970-01-01 01:00:00+01:00", 2**55),
        (pa.date32(), 0, "1970-01-01", 2**31 - 1),
        (pa.duration("s"), 1, "0:00:01", 2**60),
    ],
)
def test_a_time_far_away_is_an_error_of_its_row(
    kind: pa.DataType, near: int, written: str, far: int, raw: Tokenizer
) -> None:
    integers = pa.array([near, far], pa.int32() if pa.types.is_date32(kind) else pa.int64())
    first, second = texts_of(PromptSource(template="{t}"), pa.table({"t": integers.view(kind)}), raw)
    assert first == written
    assert second == RowError(
        "template",
        f"template needs column 't', which cannot be written in this row: Python cannot hold this {kind}",
    )


def test_times_of_nanoseconds_are_written_to_the_microsecond(raw: Tokenizer) -> None:
    table = pa.table({"d": pa.array([1_500], pa.duration("ns")), "t": pa.array([1_500], pa.time64("ns"))})
    assert texts_of(PromptSource(template="{d} {t}"), table, raw) == ["0:00:00.000001 00:00:00.000001"]

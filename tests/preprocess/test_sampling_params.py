"""Sampling parameters: one request's, and a column of them."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbatch.errors import DataError, ParameterError, RowError
from llmbatch.preprocess.sampling_column import check_sampling_column, resolve_sampling
from llmbatch.preprocess.sampling_params import NAMES, SamplingParams

BASE = SamplingParams()
KNOWN = ", ".join(NAMES)


def test_the_default_is_greedy_with_512_tokens() -> None:
    assert BASE.greedy
    assert (BASE.max_tokens, BASE.temperature, BASE.top_p, BASE.top_k) == (512, 0.0, 1.0, 0)
    assert (BASE.seed, BASE.stop, BASE.ignore_eos) == (None, (), False)


def test_a_temperature_above_zero_is_not_greedy() -> None:
    assert not SamplingParams(temperature=0.1).greedy


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"max_tokens": -3}, "max_tokens must be at least 1, got -3"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 2**31}, "max_tokens must be at most 2147483647, got 2147483648"),
        ({"max_tokens": True}, "max_tokens must be a whole number, got True"),
        ({"max_tokens": "5"}, "max_tokens must be a whole number, got '5'"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, got 1.5"),
        ({"max_tokens": float("nan")}, "max_tokens must be a whole number, got nan"),
        ({"max_tokens": float("inf")}, "max_tokens must be a whole number, got inf"),
        ({"temperature": -0.5}, "temperature must be at least 0, got -0.5"),
        ({"temperature": float("nan")}, "temperature must be a finite number, got nan"),
        ({"temperature": "1"}, "temperature must be a finite number, got '1'"),
        ({"temperature": False}, "temperature must be a finite number, got False"),
        ({"temperature": 10**400}, "temperature must be a finite number, got 1" + "0" * 299 + "..."),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, got 1.01"),
        ({"top_k": -1}, "top_k must be at least 0 (0 keeps all tokens), got -1"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 1025}, "n must be at most 1024, got 1025"),
        ({"logprobs": 10000}, "logprobs must be at most 20, got 10000"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be at least 0, got -1"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty must be above 0 (1 changes nothing), got 5e-324"),
        ({"logit_bias": 3}, "logit_bias must map token ids to numbers, got 3"),
        ({"logit_bias": {"a": 1}}, "logit_bias must have token ids as its keys, got 'a'"),
        ({"stop": "\ud800"}, r"stop must be valid UTF-8, got '\ud800' (surrogates not allowed)"),
        ({"logit_bias": {"5": 101}}, "logit_bias of token 5 must be at least -100 and at most 100, got 101"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**63}, "seed must be at most 9223372036854775807, got 9223372036854775808"),
        (
            {"seed": 2**63 - 2, "n": 3},
            "seed must be at most 9223372036854775805, so that draw i of n has seed + i, got 9223372036854775806",
        ),
        ({"stop": [1]}, "stop must be a string or a list of strings, got [1]"),
        ({"stop": ["a", ""]}, "stop must hold no empty string, got ['a', '']"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ],
)
def test_a_value_out_of_range_is_refused(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**parameters)
    assert str(caught.value) == text


def test_values_are_brought_to_one_form_so_that_equal_ones_compare_equal() -> None:
    given: dict[str, Any] = {
        "max_tokens": np.int64(7),
        "temperature": 1,
        "stop": ["a"],
        "ignore_eos": np.True_,
    }
    params = SamplingParams(**given)
    assert params == SamplingParams(max_tokens=7, temperature=1.0, stop=("a",), ignore_eos=True)
    assert [type(value) for value in (params.max_tokens, params.temperature, params.ignore_eos)] == [
        int,
        float,
        bool,
    ]


def test_one_stop_string_needs_no_list() -> None:
    assert SamplingParams.from_mapping({"stop": "END"}).stop == ("END",)


def test_a_whole_float_counts_as_an_integer() -> None:
    assert SamplingParams.from_mapping({"max_tokens": 16.0}).max_tokens == 16


def test_a_mapping_beats_the_base_and_none_means_not_given() -> None:
    base = SamplingParams(max_tokens=8, temperature=0.5)
    params = SamplingParams.from_mapping({"max_tokens": 9, "temperature": None, "seed": 0}, base)
    assert params == SamplingParams(max_tokens=9, temperature=0.5, seed=0)


def test_an_unknown_key_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams.from_mapping({"max_new_tokens": 5})
    assert (
        str(caught.value) == f"unknown sampling parameter 'max_new_tokens': did you mean max_tokens? known are {KNOWN}"
    )


@pytest.mark.parametrize(
    ("given", "meant"), [("max_completion_tokens", "max_tokens"), ("guided_json", "structured_outputs")]
)
def test_a_name_that_others_have_for_a_parameter_is_understood(given: str, meant: str) -> None:
    with pytest.raises(ParameterError, match=rf"^unknown sampling parameter '{given}': did you mean {meant}\? "):
        SamplingParams.from_mapping({given: 5})


def test_without_a_column_all_rows_have_the_base() -> None:
    resolved = resolve_sampling(None, BASE, rows=3)
    assert resolved.params == [BASE]
    assert resolved.params_index.tolist() == [0, 0, 0]
    assert resolved.params_index.dtype == np.int32
    assert resolved.errors == {}


def struct_column(rows: list[dict[str, Any] | None], kind: pa.DataType | None = None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(rows, kind)])


def test_a_struct_column_gives_what_is_not_null() -> None:
    base = SamplingParams(max_tokens=8, temperature=0.5)
    column = struct_column(
        [
            {"max_tokens": 1, "stop": ["x"]},
            None,
            {"max_tokens": None, "stop": None},
            {"max_tokens": 1, "stop": ["x"]},
        ]
    )
    resolved = resolve_sampling(column, base, rows=4)
    per_row = [resolved.params[i] for i in resolved.params_index]
    first = SamplingParams(max_tokens=1, temperature=0.5, stop=("x",))
    assert per_row == [first, base, base, first]
    assert len(resolved.params) == 2


def test_a_bad_value_in_a_struct_is_an_error_of_its_row() -> None:
    column = struct_column([{"max_tokens": 3}, {"max_tokens": -3}])
    resolved = resolve_sampling(column, BASE, rows=2)
    assert resolved.errors == {1: RowError("parameters", "max_tokens must be at least 1, got -3")}
    assert resolved.params_index.tolist() == [0, -1]


def test_numbers_of_a_struct_may_be_decimals_which_is_what_duckdb_makes_of_them() -> None:
    rows: list[dict[str, Any] | None] = [
        {"temperature": Decimal("0.5"), "max_tokens": Decimal("3.0")},
        {"temperature": Decimal("0.5"), "max_tokens": Decimal("3.5")},
    ]
    resolved = resolve_sampling(struct_column(rows), BASE, rows=2)
    assert resolved.params == [SamplingParams.from_mapping({"temperature": 0.5, "max_tokens": 3}, BASE)]
    assert [error.message for error in resolved.errors.values()] == [
        "max_tokens must be a whole number, got Decimal('3.5')"
    ]


def test_an_unknown_field_of_a_struct_is_an_error_of_the_command() -> None:
    schema = pa.schema({"p": pa.struct({"max_tokens": pa.int64(), "tokens": pa.int64()})})
    text = f"unknown sampling parameter 'tokens': did you mean min_tokens? known are {KNOWN}"
    with pytest.raises(ParameterError) as caught:
        check_sampling_column(schema, "p")
    assert str(caught.value) == text
    with pytest.raises(ParameterError) as caught:
        resolve_sampling(pa.chunked_array([pa.nulls(1, schema.field("p").type)]), BASE, rows=1)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"tokens": 3}',
            f"unknown sampling parameter 'tokens': did you mean min_tokens? known are {KNOWN}",
        ),
        (
            "{",
            "sampling parameters must be a JSON object, got '{': "
            "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ("[1]", "sampling parameters must be a JSON object, got '[1]'"),
        ('{"temperature": NaN}', "temperature must be a finite number, got nan"),
        ('{"max_tokens": "5"}', "max_tokens must be a whole number, got '5'"),
    ],
)
def test_a_bad_json_value_is_an_error_of_its_row(text: str, message: str) -> None:
    resolved = resolve_sampling(pa.chunked_array([["{}", text]]), BASE, rows=2)
    assert resolved.errors == {1: RowError("parameters", message)}


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_json_is_read_from_any_text_type(kind: pa.DataType) -> None:
    texts = pa.array(['{"seed": 1}', None, "null", '{"seed":1}', "{}"]).dictionary_encode()
    column = pa.chunked_array([texts.cast(pa.string()).cast(kind) if not pa.types.is_dictionary(kind) else texts])
    resolved = resolve_sampling(column, BASE, rows=5)
    assert [resolved.params[i].seed for i in resolved.params_index] == [1, None, None, 1, None]
    assert len(resolved.params) == 2


def test_parameters_that_are_not_utf8_are_an_error_of_their_row() -> None:
    column = pa.chunked_array([pa.array([b"{}", b"\xff"], pa.binary()).view(pa.string())])
    reason = "it is not UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"
    expected = {1: RowError("parameters", f"sampling parameters cannot be read: {reason}")}
    assert resolve_sampling(column, BASE, rows=2).errors == expected


@pytest.mark.parametrize("column", [pa.chunked_array([pa.nulls(2)]), pa.chunked_array([pa.nulls(2, pa.string())])])
def test_a_null_row_gives_nothing(column: pa.ChunkedArray) -> None:
    resolved = resolve_sampling(column, BASE, rows=2)
    assert [resolved.params[i] for i in resolved.params_index] == [BASE, BASE]


def test_no_rows_resolve_to_nothing() -> None:
    empty = pa.chunked_array([], pa.struct({"seed": pa.int64()}))
    assert resolve_sampling(empty, BASE, rows=0).params_index.tolist() == []


def test_a_column_that_is_neither_structs_nor_text_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        check_sampling_column(pa.schema({"p": pa.int64()}), "p")
    assert str(caught.value) == "the sampling-parameters column must hold structs or JSON text, got int64"


def test_a_missing_column_is_refused_with_the_closest_name() -> None:
    with pytest.raises(DataError) as caught:
        check_sampling_column(pa.schema({"params": pa.string(), "id": pa.int64()}), "parms")
    assert str(caught.value) == (
        "the sampling-parameters column 'parms' is not in the input, whose columns are 'params', 'id'. "
        "Did you mean 'params'?"
    )


ROW = st.none() | st.fixed_dictionaries(
    {
        "max_tokens": st.none() | st.integers(-1, 3),
        "temperature": st.none() | st.sampled_from([0.0, 0.5, float("nan")]),
        "stop": st.none() | st.lists(st.sampled_from(["a", "b", ""]), max_size=2),
        "ignore_eos": st.none() | st.booleans(),
    }
)
KIND = pa.struct(
    {
        "max_tokens": pa.int64(),
        "temperature": pa.float64(),
        "stop": pa.list_(pa.string()),
        "ignore_eos": pa.bool_(),
    }
)


@given(st.lists(ROW, max_size=12))
@settings(max_examples=60, deadline=None)
def test_structs_and_json_resolve_as_each_row_would_alone(rows: list[dict[str, Any] | None]) -> None:
    expected: list[SamplingParams | RowError] = []
    for row in rows:
        try:
            expected.append(SamplingParams.from_mapping(row or {}, BASE))
        except ParameterError as error:
            expected.append(RowError("parameters", str(error)))
    texts = [None if row is None else json.dumps(row) for row in rows]
    for column in (struct_column(rows, KIND), pa.chunked_array([texts], pa.string())):
        resolved = resolve_sampling(column, BASE, rows=len(rows))
        got = [
            resolved.errors[row] if index < 0 else resolved.params[index]
            for row, index in enumerate(resolved.params_index.tolist())
        ]
        assert got == expected
        assert len(set(resolved.params)) == len(resolved.params)

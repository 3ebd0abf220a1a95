"""Events of a stream."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from llmbatch.serving.chunks import event


@given(st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("\x85\u2028\u2029\r\n\x1c"))))
def test_an_event_is_one_line_whatever_is_taken_for_the_end_of_one(text: str) -> None:
    line, empty = event({"text": text}).decode().splitlines()
    assert empty == ""
    assert json.loads(line.removeprefix("data: ")) == {"text": text}

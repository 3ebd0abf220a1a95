"""Work that is done when it is submitted."""

from __future__ import annotations

import pytest

from llmbatch.system.at_once import AtOnce


def test_work_is_done_when_it_was_submitted() -> None:
    done: list[int] = []
    future = AtOnce().submit(done.append, 1)
    assert done == [1]
    assert future.done()


def test_what_work_raises_is_raised_by_who_asks_for_its_result() -> None:
    future = AtOnce().submit(int, "no number")
    with pytest.raises(ValueError, match="no number"):
        future.result()


def test_an_interrupt_is_raised_at_once() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        AtOnce().submit(interrupt)

"""Requests reach endpoints and come back, also where one of several cannot be reached for a while, or for good."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from llmbatch.errors import JobError
from llmbatch.remote.concurrency import Concurrency
from llmbatch.remote.endpoint import RemoteEndpoint, Unreachable
from llmbatch.remote.exchange import Exchange
from llmbatch.remote.retries import Patience

REQUESTS = list(range(40))


class Playing(RemoteEndpoint[int, str]):
    """An endpoint that cannot be reached at times."""

    def __init__(self, url: str, is_there: Callable[[int], bool]) -> None:
        super().__init__(url, None, Concurrency(start=4, most=4))
        self.is_there, self.tries = is_there, 0
        self.answers: list[int] = []

    async def answer(self, sent: int, patience: Patience, tell: Callable[[int, str], None]) -> None:
        """Answer, or give back what was sent when it was tried too often."""
        unreached = 0
        while not self.is_there(self.tries):
            self.tries += 1
            unreached += 1
            self.failed("nobody is there")
            if self.gives_back(unreached, patience):
                raise Unreachable("nobody is there", for_now=True)
            if unreached >= patience.tries:
                raise Unreachable("nobody is there, too often")
        self.tries += 1
        self.answers.append(sent)
        tell(sent, self.url)


def exchange(*endpoints: Playing, patience: Patience) -> list[int]:
    """Send all requests; returns those that were answered."""
    answered = []
    with Exchange(endpoints, patience) as open_exchange:
        open_exchange.put(REQUESTS)
        while open_exchange.pending:
            answered += [sent for sent, _ in open_exchange.take(1.0)]
    return answered


def test_what_an_endpoint_has_goes_to_another_one_after_a_few_tries(caplog: pytest.LogCaptureFixture) -> None:
    away, there = Playing("http://away", lambda tries: False), Playing("http://there", lambda tries: True)
    with caplog.at_level(logging.WARNING, "llmbatch"):
        answered = exchange(away, there, patience=Patience(first=3600.0, most=3600.0))
    assert sorted(answered) == sorted(there.answers) == REQUESTS
    assert away.tries == 3 + 3  # of its first request, and one of each other; then it is left alone for an hour
    assert caplog.messages == ["the endpoint http://away does not answer: nobody is there; it is tried again"]


def test_an_endpoint_that_is_back_takes_its_part_again(caplog: pytest.LogCaptureFixture) -> None:
    away = Playing("http://away", lambda tries: tries >= 14)
    other = Playing("http://other", lambda tries: away.tries >= 15)  # all wait for the first one
    with caplog.at_level(logging.WARNING, "llmbatch"):
        answered = exchange(away, other, patience=Patience(first=0.0))
    assert sorted(answered) == REQUESTS
    assert len(away.answers) > 4
    assert "the endpoint http://away answers again" in caplog.messages


def test_no_endpoint_that_comes_back_ends_the_job() -> None:
    endpoints = [Playing(f"http://{name}", lambda tries: False) for name in "ab"]
    with pytest.raises(JobError, match=r"^the endpoint http://[ab] does not answer: nobody is there; start it again"):
        exchange(*endpoints, patience=Patience(first=0.0, tries=6))


def test_one_endpoint_alone_is_tried_to_the_end() -> None:
    alone = Playing("http://alone", lambda tries: tries >= 7)
    assert sorted(exchange(alone, patience=Patience(first=0.0, tries=8))) == REQUESTS

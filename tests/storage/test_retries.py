"""What file systems refuse: a second try where that may help, and one sentence where it does not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from aiohttp import ClientResponseError
from botocore.exceptions import ClientError, NoCredentialsError, ProfileNotFound, ReadTimeoutError, SSLError
from s3fs.errors import translate_boto_error

from llmbatch.errors import StorageError
from llmbatch.storage import retries
from llmbatch.storage.location import Location
from llmbatch.storage.retries import RetryTime, is_passing, refusal
from tests.support.s3 import S3Server, Trouble, s3_fixture  # noqa: F401

BUSY = Trouble(503, "ServiceUnavailable")
ANSWER_LOST = Trouble(500, "InternalError", done=True)


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    return s3.bucket("refusals")


@pytest.fixture
def place(s3: S3Server, bucket: str) -> Iterator[Location]:
    place = Location.at(f"{bucket}/out", s3.storage_options)
    yield place
    place.clear()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited between tries. No time passes."""
    waits: list[float] = []
    clock = SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits))
    monkeypatch.setattr(retries, "time", clock)
    return waits


REQUESTS: dict[str, Callable[[Location], object]] = {
    "names": lambda place: place.names(),
    "size": lambda place: place.size("a"),
    "read": lambda place: place.read("a"),
    "write": lambda place: place.write("b", b"two"),
    "create": lambda place: place.create("b", b"two"),
    "open": lambda place: place.open("a").read(),
    "move": lambda place: place.move("a", place, "b"),
    "remove": lambda place: place.remove("a"),
    "clear": lambda place: place.clear(),
}


def answered(status: int) -> ClientResponseError:
    return ClientResponseError(Mock(), (), status=status)


def contents(place: Location) -> dict[str, bytes | None]:
    return {name: place.read(name) for name in place.names()}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("trouble", [BUSY, ANSWER_LOST], ids=["busy", "answer lost"])
def test_trouble_with_any_request_changes_nothing(
    place: Location, s3: S3Server, waits: list[float], name: str, trouble: Trouble
) -> None:
    request = REQUESTS[name]
    place.write("a", b"one")
    answer = request(place)
    expected = contents(place)
    for position in range(10):
        place.clear()
        place.write("a", b"one")
        s3.troubles[:] = [None] * position + [trouble]
        assert request(place) == answer
        if s3.troubles:  # fewer requests are made
            s3.troubles.clear()
            break
        assert contents(place) == expected
    assert len(waits) == position >= 1


def test_waits_grow_until_patience_is_out(place: Location, s3: S3Server, waits: list[float]) -> None:
    s3.troubles[:] = [BUSY] * 100
    with pytest.raises(StorageError) as caught:
        place.read("a")
    s3.troubles.clear()
    longest = [0.25, 0.5, 1.0, 2.0, *[4.0] * (len(waits) - 4)]
    before_last = list(zip(waits, longest, strict=True))[:-1]
    assert all(most / 2 <= wait <= most for wait, most in before_last)
    assert len({wait / most for wait, most in before_last}) > 5  # no two clients keep time
    assert sum(waits) == pytest.approx(place.retry_time.seconds)
    assert place.retry_time.seconds == 60
    assert str(caught.value) == (
        f"{place.url}/a cannot be read: in trouble: check the endpoint and the network, and run the same command again"
    )


def test_a_wait_is_warned_of_once(
    place: Location, s3: S3Server, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    s3.troubles[:] = [BUSY] * 3
    place.write("a", b"one")
    assert len(waits) == 3
    assert caplog.messages == [f"{place.url}/a cannot be written: in trouble; trying again for 60 s"]


def test_a_server_that_comes_back_is_found(place: Location, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            s3.start()

    monkeypatch.setattr(retries, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(waits)))
    s3.stop()
    assert place.create("a", b"one")
    assert len(waits) == 3
    assert place.read("a") == b"one"


def test_a_server_that_stays_away_is_one_sentence(place: Location, s3: S3Server) -> None:
    s3.stop()
    try:
        with pytest.raises(StorageError) as caught:
            replace(place, retry_time=RetryTime(0.0)).read("a")
    finally:
        s3.start()
    assert str(caught.value) == (
        f'{place.url}/a cannot be read: Could not connect to the endpoint URL: "{s3.url}/refusals/out/a": '
        "check the endpoint and the network, and run the same command again"
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_a_bucket_that_is_not_there_is_one_sentence(s3: S3Server, waits: list[float], name: str) -> None:
    place = Location.at("s3://nowhere/out", s3.storage_options)
    with pytest.raises(StorageError) as caught:
        REQUESTS[name](place)
    assert str(caught.value).endswith(": create the bucket or name another one")
    assert waits == []


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_refused_credentials_are_one_sentence(place: Location, s3: S3Server, waits: list[float], code: str) -> None:
    s3.troubles[:] = [Trouble(403, code)]
    with pytest.raises(StorageError) as caught:
        place.write("a", b"one")
    assert str(caught.value) == (
        f"{place.url}/a cannot be written: in trouble: check the credentials and what they allow"
    )
    assert waits == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a"),
            "OUT cannot be written: No space left on device: make room and run the same command again",
        ),
        (
            OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "a"),
            "OUT cannot be written: Disk quota exceeded: make room and run the same command again",
        ),
        (
            OSError(errno.EROFS, os.strerror(errno.EROFS), "a"),
            "OUT cannot be written: Read-only file system: name a place that can be written",
        ),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "a"),
            "OUT cannot be written: Permission denied: change its permissions or name another place",
        ),
        (OSError(errno.EIO, os.strerror(errno.EIO), "a"), "OUT cannot be written: Input/output error"),
        (ValueError(), "OUT cannot be written: ValueError"),
        (
            translate_boto_error(ClientError({"Error": {"Code": "NoSuchBucket", "Message": None}}, "PutObject")),
            "OUT cannot be written: NoSuchBucket: create the bucket or name another one",
        ),
        (
            translate_boto_error(ClientError({"Error": {"Code": "400", "Message": "Bad Request"}}, "HeadObject")),
            "OUT cannot be written: Bad Request: check the region, and whether the credentials have expired",
        ),
        (
            ProfileNotFound(profile="nobody"),
            "OUT cannot be written: The config profile (nobody) could not be found: name one that ~/.aws/config has in "
            "AWS_PROFILE, or unset it",
        ),
        (
            NoCredentialsError(),
            "OUT cannot be written: Unable to locate credentials: check the credentials and what they allow",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refusal_says_what_why_and_the_way_out(error: Exception, message: str) -> None:
    assert str(refusal("OUT", "written", error)) == message


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (ReadTimeoutError(endpoint_url="e"), True),
        (SSLError(endpoint_url="e", error="self-signed certificate"), False),
        (ClientError({"Error": {"Code": "ConditionalRequestConflict"}}, "PutObject"), True),
        (
            ClientError({"Error": {"Code": "NoSuchKey"}, "ResponseMetadata": {"HTTPStatusCode": 404}}, "GetObject"),
            False,
        ),
        (answered(503), True),
        (answered(501), False),
        (answered(429), True),
        (answered(401), False),
        (OSError(errno.ENOSPC, ""), False),
        (FileNotFoundError(), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, passes: bool) -> None:
    assert is_passing(error) is passes


@pytest.mark.parametrize("classes", [retries._UNREACHABLE, retries._UNTRUSTED, retries._NO_CREDENTIALS])
def test_every_class_of_a_package_that_is_installed_is_there(classes: dict[str, tuple[str, ...]]) -> None:
    found = 0
    for module, kinds in classes.items():
        if find_spec(module.partition(".")[0]) is not None and module.partition(".")[0] not in ("google", "azure"):
            found += len(kinds)
            assert all(issubclass(getattr(import_module(module), kind), Exception) for kind in kinds)
    assert found


def test_what_this_machine_does_not_permit_is_no_matter_of_credentials() -> None:
    error = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    assert str(refusal("OUT", "written", error)) == (
        "OUT cannot be written: Operation not permitted: change its permissions or name another place"
    )


def test_patience_that_is_cut_ends_a_wait(place: Location, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    hurried = replace(place, retry_time=RetryTime(60.0))

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        hurried.child("in it").retry_time.cut(1.0)

    monkeypatch.setattr(retries, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(waits)))
    s3.troubles[:] = [BUSY] * 100
    with pytest.raises(StorageError, match="cannot be read: in trouble"):
        hurried.read("a")
    s3.troubles.clear()
    assert sum(waits) == pytest.approx(1.0)

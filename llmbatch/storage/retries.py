"""Errors of file systems: whether to try again, and the sentence a user reads."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from llmbatch.errors import StorageError

_FIRST_WAIT = 0.25  # seconds between the first two tries; each next wait is twice as long
_LONGEST_WAIT = 4.0

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PASSING = (
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.EREMOTEIO,
    errno.ETIMEDOUT,
)
# Classes by the module that defines them. Their packages need not be installed: an error of a module that was never
# imported cannot have been raised.
_UNREACHABLE: Final = {
    "aiohttp.client_exceptions": ("ClientConnectionError", "ClientPayloadError"),
    "azure.core.exceptions": ("ServiceRequestError", "ServiceResponseError"),
    "botocore.exceptions": ("ConnectionError", "HTTPClientError"),
    "botocore.parsers": ("ResponseParserError",),
    "google.auth.exceptions": ("TransportError",),
    "requests.exceptions": ("ConnectionError", "Timeout"),
}
_UNTRUSTED: Final = {
    "aiohttp.client_exceptions": ("ClientSSLError",),
    "botocore.exceptions": ("SSLError",),
    "requests.exceptions": ("SSLError",),
    "ssl": ("SSLError",),
}
_NO_CREDENTIALS: Final = {
    "azure.core.exceptions": ("ClientAuthenticationError",),
    "botocore.exceptions": (
        "CredentialRetrievalError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "TokenRetrievalError",
    ),
    "google.auth.exceptions": ("DefaultCredentialsError", "RefreshError"),
}
_NO_PROFILE: Final = {"botocore.exceptions": ("ProfileNotFound",)}
_AGAIN = ("ConditionalRequestConflict",)  # codes of errors that other fields do not tell
_SLOW_DOWN = (408, 429)  # the statuses below 500 that ask for another try
_NEVER = (501, 505)  # the statuses from 500 on that another try does not change

_T = TypeVar("_T")
_log = logging.getLogger("llmbatch")


@contextlib.contextmanager
def refusing(what: str, done: str) -> Iterator[None]:
    """Turn an error of the operating system in this block into a `refusal`."""
    try:
        yield
    except OSError as error:
        raise refusal(what, done, error) from error


class RetryTime:
    """For how many seconds a request that fails is tried again. It can be cut, also while one is."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def cut(self, seconds: float) -> None:
        """Try no longer than so many seconds from now on."""
        self.seconds = min(self.seconds, seconds)


def persist(what: str, done: str, attempt: Callable[[], _T], retry_time: RetryTime) -> _T:
    """Send a request to an object store, and repeat it for `retry_time` while its error is transient.

    Raises the `refusal` of the last error. Any exception counts: the packages of stores raise whatever they like.
    """
    begun = time.monotonic()
    wait = _FIRST_WAIT
    while True:
        try:
            return attempt()
        except Exception as error:
            left = begun + retry_time.seconds - time.monotonic()
            if not is_passing(error) or left <= 0.0:
                raise refusal(what, done, error) from error
            if wait == _FIRST_WAIT:
                _log.warning(
                    "%s cannot be %s: %s; trying again for %g s", what, done, _reason(error), retry_time.seconds
                )
        pause = wait * random.uniform(0.5, 1.0)  # or all that a store turned away would come back at once
        time.sleep(min(pause, left))
        wait = min(2 * wait, _LONGEST_WAIT)


def is_passing(error: BaseException) -> bool:
    """Tell whether the same request may succeed later: a lost connection, a timeout, a server's own fault."""
    for link in _chain(error):
        if isinstance(link, _loaded(_UNTRUSTED)):
            return False
        if isinstance(link, (ConnectionError, TimeoutError, *_loaded(_UNREACHABLE))):
            return True
        if isinstance(link, OSError) and link.errno in _PASSING:
            return True
        if _code(link) in _AGAIN:
            return True
        status = _status(link)
        if status is not None and (status in _SLOW_DOWN or (status >= 500 and status not in _NEVER)):
            return True
    return False


def is_container_missing(error: BaseException) -> bool:
    """Tell whether the bucket or container itself is missing, and not only a file in it."""
    return any(_code(link) in ("NoSuchBucket", "ContainerNotFound") for link in _chain(error))


def is_taken(error: BaseException) -> bool:
    """Tell whether a file was not created because it already exists."""
    return any(isinstance(link, FileExistsError) or _status(link) == 412 for link in _chain(error))


def refusal(what: str, done: str, error: BaseException) -> StorageError:
    """Build the error of `what` that cannot be `done` ("read", "written", ...) because of `error`, with the way out."""
    reason = _reason(error)
    way_out = _way_out(error)
    sentence = f"{what} cannot be {done}: {reason}"
    return StorageError(f"{sentence}: {way_out}" if way_out else sentence)


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and not is_container_missing(error):
        return os.strerror(errno.ENOENT)
    said = error.strerror if isinstance(error, OSError) and error.errno else str(error)
    if said and said != "None":
        return " ".join(said.split()).rstrip(".")
    codes = [str(code) for code in map(_code, _chain(error)) if code]  # some servers send nothing else
    return codes[0] if codes else type(error).__name__


def _way_out(error: BaseException) -> str | None:
    if is_container_missing(error):
        return "create the bucket or name another one"
    if is_passing(error):
        return "check the endpoint and the network, and run the same command again"
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in _FULL:
            return "make room and run the same command again"
        if isinstance(link, OSError) and link.errno == errno.EROFS:
            return "name a place that can be written"
        if isinstance(link, PermissionError) and link.errno is not None:  # of this machine; a store's has no number
            return "change its permissions or name another place"
        if isinstance(link, (PermissionError, *_loaded(_NO_CREDENTIALS))) or _status(link) in (401, 403):
            return "check the credentials and what they allow"
        if isinstance(link, _loaded(_NO_PROFILE)):
            return "name one that ~/.aws/config has in AWS_PROFILE, or unset it"
        if _code(link) == "400":  # of a request to whose answer S3 gives no text
            return "check the region, and whether the credentials have expired"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _loaded(classes: Mapping[str, Sequence[str]]) -> tuple[type[BaseException], ...]:
    """Return those of these classes whose modules are imported."""
    modules = [(sys.modules[name], kinds) for name, kinds in classes.items() if name in sys.modules]
    return tuple(getattr(module, kind) for module, kinds in modules for kind in kinds)


def _code(error: BaseException) -> object:
    """Return the service's own name of the error: S3's and Azure's."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return response.get("Error", {}).get("Code")
    return getattr(error, "error_code", None)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status, which every package keeps in another place."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for name in ("status", "status_code", "code"):  # aiohttp, azure-core, gcsfs
        status = getattr(error, name, None)
        if isinstance(status, int):
            return status
    return None

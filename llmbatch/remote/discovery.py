"""What is at a URL: whether it answers, with which key, which models it has, and whether it is llmbatch's own."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from llmbatch.errors import InputError, JobError, ModelError, ParameterError
from llmbatch.remote.endpoint import reason_of
from llmbatch.remote.replies import message_of, refused_key
from llmbatch.remote.windows.messages import PATH, VERSION

_KEY: Final = "OPENAI_API_KEY"
_KEY_RULE: Final = "key, of letters, digits and signs without spaces"
_SECONDS: Final = 30.0  # that an endpoint may take to say what it has
_NAMED: Final = 5  # models in a message


@dataclass(frozen=True, slots=True)
class WindowsAbout:
    """What an endpoint that takes windows says of its model."""

    model_files: str  # a digest


@dataclass(frozen=True, slots=True)
class Discovered:
    """What an endpoint says of itself."""

    url: str
    windows: WindowsAbout | None  # None: it is no llmbatch, or one of another version


def read_key(file: str | None) -> str | None:
    """Read the key of endpoints from a file, or from the environment; None: they have none. Raises ParameterError."""
    if file is None:
        key = os.environ.get(_KEY, "").strip()
        if key and not _is_key(key):
            raise ParameterError(f"{_KEY} must hold one {_KEY_RULE}: set it anew, or give a file (--api-key-file)")
        return key or None
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"api_key_file must be a file with a key, got {file!r} ({reason_of(error)})",
            option="api_key_file",
            value=file,
        ) from None
    if not _is_key(key):
        raise ParameterError(
            f"api_key_file must hold one {_KEY_RULE}, got {file!r}",
            option="api_key_file",
            value=file,
        )
    return key


def _is_key(key: str) -> bool:
    """Tell whether a key can stand in a header."""
    return key.isascii() and key.isprintable() and len(key.split()) == 1


def discover(url: str, key: str | None, model: str) -> Discovered:
    """Ask an endpoint what it is. Raises InputError where it has no such model or wants another key, and JobError."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=_SECONDS) as client:
        models = _models(url, client)
        windows = _windows(url, client)
    if models is not None and model not in models:
        listed = ", ".join(map(repr, models[:_NAMED])) + (", ..." if len(models) > _NAMED else "")
        raise ModelError(
            f"model must be one that the endpoint {url} has, got {model!r}: it has {listed or 'none'} (--model)"
        )
    return Discovered(url, windows)


def _windows(url: str, client: httpx.Client) -> WindowsAbout | None:
    reply = _get(url, client, PATH)
    try:
        told: Any = json.loads(reply.content)
        if reply.status_code == 200 and told["windows"] == VERSION:
            return WindowsAbout(str(told["model_files"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return None


def _get(url: str, client: httpx.Client, path: str) -> httpx.Response:
    try:
        return client.get(path)
    except httpx.RequestError as error:  # of one that is slow, nobody can tell whether it is llmbatch's
        raise JobError(
            f"the endpoint {url} cannot be reached ({reason_of(error)}): start it first, or mend the URL (--beside)"
        ) from None


def _models(url: str, client: httpx.Client) -> tuple[str, ...] | None:
    reply = _get(url, client, "/v1/models")
    if reply.status_code in (401, 403):
        raise InputError(refused_key(url, reply.status_code, message_of(reply.content)))
    if reply.status_code != 200:
        return None
    try:
        listed: Any = json.loads(reply.content)["data"]
        return tuple(str(one["id"]) for one in listed)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None

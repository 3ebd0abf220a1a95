"""Every exception that llmbatch raises to a caller, and the error a row carries.

    LLMBatchError
    ├── InputError(ValueError)        the command, its options or its input are wrong: nothing was started
    │   ├── ParameterError            a parameter is unknown or out of range
    │   ├── DataError                 a file, a column or a type is not what was asked for
    │   │   └── OtherCommandError     the output was made, or begun, by a command that gives other answers
    │   └── ModelError                the model cannot be found, read or supported
    └── JobError(RuntimeError)        the job started and could not be finished; what it finished is kept
        ├── StorageError              a file system refuses to read or write
        └── JobStopped                the job was asked to end

A message is one sentence or two: the rule, the value that broke it, the way out.
A row that fails does not raise: it carries a `RowError`, and the other rows go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ErrorKind = Literal[
    "null_prompt",
    "encoding",
    "token_ids",
    "too_long",
    "template",
    "messages",
    "parameters",
    "engine",
    "timeout",
    "output",
]


class LLMBatchError(Exception):
    """Base of all errors of llmbatch."""


class InputError(LLMBatchError, ValueError):
    """The command, its options or its input are wrong; nothing was started."""


class ParameterError(InputError):
    """A parameter is unknown or out of range.

    `option` is its name and `value` what was given for it, where the error is of one parameter alone.
    """

    def __init__(self, message: str, *, option: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.option = option
        self.value = value


class DataError(InputError):
    """A file, a column or a type is not what was asked for."""


class OtherCommandError(DataError):
    """The output was made, or begun, by a command that gives other answers."""


class ModelError(InputError):
    """The model cannot be found, read or supported."""


class JobError(LLMBatchError, RuntimeError):
    """The job started and could not be finished; what it finished is kept."""


class StorageError(JobError):
    """A file system refuses to read or write."""


class JobStopped(JobError):
    """The job was asked to end, and did; the same command goes on with it."""


class StoppedEarly(KeyboardInterrupt):
    """A job was asked to end while it was being made ready. No `Exception`, which libraries would take for theirs."""


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row has no answer: its `kind`, and a sentence for `error`."""

    kind: ErrorKind
    message: str


for _error in (
    LLMBatchError,
    InputError,
    ParameterError,
    DataError,
    OtherCommandError,
    ModelError,
    JobError,
    StorageError,
    JobStopped,
    StoppedEarly,
):
    _error.__module__ = "llmbatch"  # which they are imported from, and which tracebacks name

"""The form of error messages: `<name> must <rule>, got <value>: <way out>`, lower case, no final period."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDERS = ("llmbatch", "operators", "kernels")
MODULES = sorted(
    file
    for folder in FOLDERS
    for file in (ROOT / folder).rglob("*.py")
    if not (ROOT / "llmbatch" / "operators" in file.parents or ROOT / "llmbatch" / "kernels" in file.parents)
)
# Errors of llmbatch, and those of Python that its users read. The message is the last argument.
ERRORS = {
    "InputError", "ParameterError", "DataError", "ModelError", "JobError", "StorageError", "JobStopped", "RowError",
    "MessagesError", "Unavailable", "ValueError", "TypeError", "ImportError",
}  # fmt: skip  # a list of words
NAMES = {"JSONL", "GGUF", "Parquet", "LLMOperator"}  # words that begin a message as they are written everywhere
VALUE = "\0"  # stands for what is known only when the error is raised


def text(node: ast.expr) -> str:
    """Write the message of an expression, with `VALUE` for each part that is not a literal."""
    match node:
        case ast.Constant(value=str(literal)):
            return literal
        case ast.JoinedStr(values=parts):
            return "".join(text(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text(left) + text(right)
        case _:
            return VALUE


def choices(node: ast.expr) -> Iterator[str]:
    """Yield each message that an expression may be."""
    if isinstance(node, ast.IfExp):
        yield from choices(node.body)
        yield from choices(node.orelse)
    else:
        yield text(node)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each error that a module makes."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in ERRORS:
            yield from ((node.lineno, message) for message in choices(node.args[-1]))


def fault(message: str) -> str | None:
    """Name the rule that a message breaks, or return None."""
    word = re.match(r"[^\s,:;'\"]*", message.lstrip("'\""))
    if message.endswith("."):
        return "must not end in a period"
    if word and word[0][:1].isupper() and word[0] not in NAMES:
        return "must not begin with an upper-case letter"
    plain = re.sub(r"\([^)]*\)", "", message)
    if re.search(r" must [^:]*, and (it|they|that|this) ", plain) or re.search(r" must [^:;]*; ", plain):
        return "must name the value by ', got' or ', but', and the way out behind a colon"
    if " can not " in message or "can't" in message:
        return "must say cannot"
    return None


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_messages_have_one_form(file: Path) -> None:
    faults = [
        f"{file.relative_to(ROOT)}:{line}: a message {rule}, got {message!r}"
        for line, message in messages(file.read_text())
        if (rule := fault(message))
    ]
    assert not faults, "\n".join(faults)


def test_messages_are_found() -> None:
    assert sum(1 for file in MODULES for _ in messages(file.read_text())) > 200


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("raise DataError(f'{name} must be 1, got {value}: {way_out}')", None),
        ("raise DataError('JSONL cannot hold this')", None),
        ("raise DataError(f'{name} must be 1.')", "must not end in a period"),
        ("raise DataError('x must be ' + rule + '.') from error", "must not end in a period"),
        ("return JobError('The rule' if one else 'x')", "must not begin with an upper-case letter"),
        ("RowError('engine', 'Row failed')", "must not begin with an upper-case letter"),
        ("raise DataError(f'x must be 1, and it is {x}')", "must name the value by ', got' or ', but'"),
        ("raise DataError(f'x must be 1; {name} has {x}')", "must name the value by ', got' or ', but'"),
    ],
)
def test_the_rules_are_checked(source: str, rule: str | None) -> None:
    faults = [found for _, message in messages(source) if (found := fault(message))]
    assert [found[: len(rule)] for found in faults] == [rule] if rule else not faults

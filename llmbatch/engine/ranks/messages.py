"""Messages from the first rank to the others: pickled, one after the other."""

from __future__ import annotations

import pickle
from typing import IO, Any


def send(stream: IO[bytes], message: object) -> None:
    """Write a message."""
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read the next message; None at the end."""
    try:
        return pickle.load(stream)
    except EOFError:
        return None

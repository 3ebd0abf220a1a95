"""Texts out of JSON, which may hold what UTF-8 cannot."""

from __future__ import annotations


def valid_text(text: str) -> str:
    """Join the halves of characters that JSON may have apart; one that is alone becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

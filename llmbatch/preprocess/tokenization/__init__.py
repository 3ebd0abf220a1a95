"""Tokenises texts, reads columns of token ids, and keeps texts of control tokens in a row's values plain.

Must not import anything that makes prompts of rows.
Start reading at `tokenizer`.
"""

__all__ = ["control_tokens", "loading", "respelled", "token_bytes", "token_ids", "tokenizer"]

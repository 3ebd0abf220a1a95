"""Turns rows into requests: prompts, chats, tokens, sampling parameters.

Must not import anything that plans or runs requests.
Start reading at `build_requests`.
"""

__all__ = [
    "build_requests", "columns", "continuations", "merging", "prompt_tokens", "prompts", "request_batch",
    "sampling_column", "sampling_params",
]  # fmt: skip  # as few lines as may be

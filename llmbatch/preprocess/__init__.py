"""Turns rows into requests: prompts, chats, tokens, sampling parameters.

Must not import anything that plans or runs requests.
Start reading at `build_requests`.
"""

__all__ = ["build_requests", "cancel_signal", "columns", "prompts", "request_batch", "sampling_params", "tokenizer"]

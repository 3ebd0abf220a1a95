"""Windows of rows between a job and an endpoint of llmbatch: messages, the job's side, and the endpoint's.

Must not import torch, nor make an engine.
Start reading at `messages`.
"""

__all__ = ["messages", "routes", "service", "worker"]

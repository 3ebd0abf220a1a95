"""Chooses tokens on the host, from the logits of a model on any device.

Must not import the engines that compute logits.
Start reading at `choice`.
"""

__all__ = ["choice", "sampler"]

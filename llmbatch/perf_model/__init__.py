"""Predicts the seconds that work takes on a device: a roofline over a model's shape and a card's rates.

Must not import torch, nor anything that plans.
Start reading at `cost`.
"""

__all__ = ["collectives", "cost", "fit", "hardware", "residency", "shape", "shares", "step_bound", "work"]

"""Runs a model over a Ray dataset, and nothing twice but what was lost.

Must not import `jobs`.
Start reading at `dataset`.
"""

from llmbatch.operators.ray.dataset import map_dataset

__all__ = ["map_dataset"]

"""Runs a model over a Ray dataset; after a death only lost rows run again.

Must not import `jobs`.
Start reading at `dataset`.
"""

from llmbatch.operators.ray.dataset import map_dataset

__all__ = ["map_dataset"]

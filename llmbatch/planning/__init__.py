"""Decides the order of a shard once: prefix tree, output lengths, order, plan, partition.

Must not import torch, nor the scheduler that follows the plan.
Start reading at `plan`.
"""

__all__ = [
    "cascade",
    "equal_prompts",
    "even_ends",
    "lengths",
    "order",
    "outliers",
    "partition",
    "pilot_sample",
    "plan",
    "plan_workload",
    "prefix_tree",
    "prepared_shard",
    "workload",
]

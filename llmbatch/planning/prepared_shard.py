"""What a shard needs before its first step and no step changes: it may be made on any thread, while others run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.equal_prompts import EqualPrompts
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.pilot_sample import first_sample
from llmbatch.planning.plan import Plan
from llmbatch.planning.plan_workload import plan_workload
from llmbatch.planning.workload import Pool, Scheduling, Workload


@dataclass(frozen=True, slots=True)
class PreparedShard:
    """A workload with all that is derived from it; nobody else may use the length model."""

    workload: Workload
    lengths: LengthModel
    trie: PageTrie
    equal: EqualPrompts
    found: NDArray[np.int32] | None  # by request: leading pages that were there; None: none was looked for
    plan: Plan | None = None  # by what is known before anything runs
    sample: NDArray[np.int32] | None = None  # the rows that run first where the plan depends on lengths

    @classmethod
    def of(cls, workload: Workload, page_size: int, found: NDArray[np.int32] | None = None) -> PreparedShard:
        """Prepare a workload without planning it."""
        tree, requests = workload.tree, len(workload)
        trie = PageTrie.build(tree.rows, tree.lcp, page_size, requests, found)
        return cls(workload, workload.length_model(), trie, EqualPrompts.of(tree, requests), found)

    def planned(self, pool: Pool, cost: CostModel, scheduling: Scheduling) -> PreparedShard:
        """Return it with a plan, and with a sample where lengths are to be learnt."""
        plan = plan_workload(self.workload, pool, cost, scheduling, self.lengths)
        sample = None if plan.settled else self.first_sample(scheduling)
        return replace(self, plan=plan, sample=sample)

    def first_sample(self, scheduling: Scheduling) -> NDArray[np.int32]:
        """Choose the rows that run first, int32."""
        tree = self.workload.tree_with_examples
        return first_sample(self.lengths, tree, fraction=scheduling.sample_fraction, seed=scheduling.seed)

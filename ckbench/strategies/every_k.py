"""every-k:K: one region spans K consecutive blocks; the last may be shorter."""

from dataclasses import dataclass

from ckbench.plan import Plan, Region, StackShape


@dataclass(frozen=True, kw_only=True)
class EveryK:
    """Recompute K blocks at a time. Kept: ceil(L/K)·b + h; peak about ceil(L/K)·b + max(h, K·a + t).

    Beats ``per-block`` in peak only beyond K·a/b layers. Others say: Megatron ``uniform`` K.
    Not the same as ``one-in-k``, which checkpoints one block in K.
    """

    k: int

    def plan(self, stack: StackShape) -> Plan:
        """Cut the stack into spans of K; K above L gives one span."""
        starts = range(0, stack.n_layers, self.k)
        regions = tuple(Region(start=i, stop=min(i + self.k, stack.n_layers)) for i in starts)
        return Plan(n_layers=stack.n_layers, regions=regions)


PLUGIN = EveryK

"""first-n:N: the first N blocks, each by itself."""

from dataclasses import dataclass

from ckbench.plan import Plan, Region, StackShape


@dataclass(frozen=True, kw_only=True)
class FirstN:
    """Recompute the first N blocks. Kept: N·b + (L - N)·a + h. Others say: Megatron ``block`` N.

    Earlier blocks are the right ones to drop: what a late block keeps is gone soon after
    backward starts.
    """

    n: int

    def plan(self, stack: StackShape) -> Plan:
        """Cover blocks 0 to N-1; N above L gives per-block."""
        regions = tuple(Region(start=i, stop=i + 1) for i in range(min(self.n, stack.n_layers)))
        return Plan(n_layers=stack.n_layers, regions=regions)


PLUGIN = FirstN

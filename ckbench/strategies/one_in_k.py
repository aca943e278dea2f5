"""one-in-k:K: blocks 0, K, 2K, ... each by itself; the others keep everything."""

from dataclasses import dataclass

from ckbench.plan import Plan, Region, StackShape


@dataclass(frozen=True, kw_only=True)
class OneInK:
    """Recompute one block in K. Kept: ceil(L/K)·b + (L - ceil(L/K))·a + h.

    Others say: Hugging Face ``every_n_layers``; torchtitan ``selective`` N picks K-1, 2K-1, ...
    """

    k: int

    def plan(self, stack: StackShape) -> Plan:
        """Cover blocks 0, K, 2K, ...; K above L leaves block 0."""
        regions = tuple(Region(start=i, stop=i + 1) for i in range(0, stack.n_layers, self.k))
        return Plan(n_layers=stack.n_layers, regions=regions)


PLUGIN = OneInK

"""nested:K: per-block regions inside regions of K blocks."""

from dataclasses import dataclass

from ckbench.plan import Plan, Region, StackShape


@dataclass(frozen=True, kw_only=True)
class Nested:
    """Recompute spans of K blocks, and each block inside again.

    Kept: L/K·b + h; peak about max(L/K·b + h, (L/K + K - 1)·b + a + t); 2L - L/K block forwards in
    backward. ``nested:L`` keeps only the stack's input. A span of one block is one region, not two.
    """

    k: int

    def plan(self, stack: StackShape) -> Plan:
        """Cut the stack into spans of K and each span into blocks."""
        regions = []
        for start in range(0, stack.n_layers, self.k):
            stop = min(start + self.k, stack.n_layers)
            inner = tuple(Region(start=i, stop=i + 1) for i in range(start, stop))
            regions.append(Region(start=start, stop=stop, children=inner if len(inner) > 1 else ()))
        return Plan(n_layers=stack.n_layers, regions=tuple(regions))


PLUGIN = Nested

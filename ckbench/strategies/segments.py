"""segments:N: N near-equal regions."""

from dataclasses import dataclass

from ckbench.plan import Plan, Region, StackShape, near_equal


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Recompute N spans whose lengths differ by at most one, longer ones first.

    Kept: N·b + h; peak about N·b + max(h, ceil(L/N)·a + t). Close to ``checkpoint_sequential``,
    which leaves its last segment uncheckpointed.
    """

    n: int

    def plan(self, stack: StackShape) -> Plan:
        """Cut the stack into N spans; N above L gives one span per block."""
        regions = tuple(Region(start=a, stop=b) for a, b in near_equal(stack.n_layers, self.n))
        return Plan(n_layers=stack.n_layers, regions=regions)


PLUGIN = Segments

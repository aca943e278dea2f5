"""sqrt: round(sqrt(L)) near-equal regions (Chen et al. 2016, arXiv 1604.06174)."""

import math
from dataclasses import dataclass

from ckbench.plan import Plan, Region, StackShape, near_equal


@dataclass(frozen=True, kw_only=True)
class SqrtSegments:
    """Recompute about sqrt(L) spans. Kept and peak as ``segments:N`` with N = round(sqrt(L)).

    The rule is optimal only where a block keeps about as much as its boundary; transformer
    blocks keep 15 to 28 times that.
    """

    def plan(self, stack: StackShape) -> Plan:
        """Cut the stack into round(sqrt(L)) spans."""
        n_regions = math.floor(math.sqrt(stack.n_layers) + 0.5)
        regions = tuple(Region(start=a, stop=b) for a, b in near_equal(stack.n_layers, n_regions))
        return Plan(n_layers=stack.n_layers, regions=regions)


PLUGIN = SqrtSegments

"""largest-n:N: the N blocks that keep most for backward, each by itself."""

from dataclasses import dataclass

from ckbench.errors import NotYetMeasured
from ckbench.plan import Plan, Region, StackShape


@dataclass(frozen=True, kw_only=True)
class LargestN:
    """Recompute the N blocks with most kept bytes, as measured on the built model. Block forwards in backward: N.

    Where blocks keep the same, earlier ones go first: what a late block keeps is gone soon after backward starts.
    """

    n: int

    def plan(self, stack: StackShape) -> Plan:
        """Cover the N largest blocks; N above L gives per-block. Raises NotYetMeasured without their figures."""
        if stack.block_saved_bytes is None:
            raise NotYetMeasured("which blocks keep most is known once the model is built")
        sizes = stack.block_saved_bytes
        by_size = sorted(range(stack.n_layers), key=lambda block: (-sizes[block], block))
        regions = tuple(Region(start=i, stop=i + 1) for i in sorted(by_size[: self.n]))
        return Plan(n_layers=stack.n_layers, regions=regions)


PLUGIN = LargestN

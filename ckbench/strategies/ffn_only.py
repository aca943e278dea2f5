"""ffn-only: the FFN of every block, with its pre-norm where that feeds it alone."""

from dataclasses import dataclass

from ckbench.plan import Plan, StackShape
from ckbench.strategies.base import parts_plan


@dataclass(frozen=True, kw_only=True)
class FfnOnly:
    """Recompute norm + FFN of every block; keep the attention part. Block forwards in backward: 0.

    Others say: Megatron ``recompute-modules mlp``.
    """

    def plan(self, stack: StackShape) -> Plan:
        """Cover one part of every block."""
        return parts_plan(stack, "ffn")


PLUGIN = FfnOnly

"""attn-only: the attention of every block, with its pre-norm where that feeds it alone."""

from dataclasses import dataclass

from ckbench.plan import Plan, StackShape
from ckbench.strategies.base import parts_plan


@dataclass(frozen=True, kw_only=True)
class AttnOnly:
    """Recompute norm + attention of every block; keep the FFN part. Block forwards in backward: 0.

    The attention runs L times more, the FFN does not.
    """

    def plan(self, stack: StackShape) -> Plan:
        """Cover one part of every block."""
        return parts_plan(stack, "attention")


PLUGIN = AttnOnly

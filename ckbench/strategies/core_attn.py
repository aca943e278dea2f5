"""core-attn: softmax(QK)V of every block, and nothing else of it."""

from dataclasses import dataclass

from ckbench.plan import Plan, StackShape
from ckbench.strategies.base import parts_plan


@dataclass(frozen=True, kw_only=True)
class CoreAttn:
    """Recompute the attention core of every block; keep queries, keys, values and all the rest. Block forwards in
    backward: 0.

    It drops the scores (batch x heads x seq x seq), so it pays where they are kept: eager and math attention. A fused
    kernel keeps none. Others say: Megatron ``selective`` (Korthikanti et al. 2022, arXiv 2205.05198).
    """

    def plan(self, stack: StackShape) -> Plan:
        """Cover the core of every block."""
        return parts_plan(stack, "core")


PLUGIN = CoreAttn

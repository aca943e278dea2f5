"""per-block: one region per block, the usual meaning of activation checkpointing."""

from dataclasses import dataclass

from ckbench.plan import Plan, Region, StackShape


@dataclass(frozen=True, kw_only=True)
class PerBlock:
    """Recompute each block by itself. Kept after forward: L·b + h; peak about L·b + max(h, a + t).

    Others say: Megatron ``full`` + ``uniform`` 1, torchtitan ``full``, Hugging Face gradient checkpointing.
    """

    def plan(self, stack: StackShape) -> Plan:
        """Cover every block by a region of its own."""
        regions = tuple(Region(start=i, stop=i + 1) for i in range(stack.n_layers))
        return Plan(n_layers=stack.n_layers, regions=regions)


PLUGIN = PerBlock

"""full: the whole stack as one region; nothing kept but its input."""

from dataclasses import dataclass

from ckbench.plan import Plan, Region, StackShape


@dataclass(frozen=True, kw_only=True)
class Full:
    """Recompute everything at once; the same plan as ``segments:1``.

    Kept: b + h. Peak: max(b + h, b + L·a + t), so it falls only where the head owns it.
    Beware: Megatron's and torchtitan's ``full`` is our ``per-block``.
    """

    def plan(self, stack: StackShape) -> Plan:
        """Cover the stack by one region."""
        return Plan(n_layers=stack.n_layers, regions=(Region(start=0, stop=stack.n_layers),))


PLUGIN = Full

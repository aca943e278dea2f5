"""none: keep every activation; the baseline of every ratio."""

from dataclasses import dataclass

from ckbench.plan import Plan, StackShape


@dataclass(frozen=True, kw_only=True)
class KeepAll:
    """Recompute nothing. Kept after forward: L·a + h (strategies page of the docs)."""

    def plan(self, stack: StackShape) -> Plan:
        """Decide nothing: no regions."""
        return Plan(n_layers=stack.n_layers)


PLUGIN = KeepAll

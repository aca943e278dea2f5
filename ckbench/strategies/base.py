"""What every strategy offers, and what the part strategies share."""

from typing import Protocol

from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, StackShape


class Strategy(Protocol):
    """A frozen dataclass whose fields are its YAML parameters; the first one is ``name:ARG``."""

    def plan(self, stack: StackShape) -> Plan:
        """Decide which spans of the stack are recomputed. Pure; no tensors."""
        ...


def parts_plan(stack: StackShape, part: str) -> Plan:
    """Cover one part of every block, each by itself. Raises PlanError when blocks lack the part."""
    if part not in stack.parts:
        raise PlanError(f"the blocks of this model have no {part} part to checkpoint")
    regions = tuple(Region(start=i, stop=i + 1, part=part) for i in range(stack.n_layers))
    return Plan(n_layers=stack.n_layers, regions=regions)

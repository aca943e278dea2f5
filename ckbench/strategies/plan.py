"""plan:FILE: a stored plan, as ``ckbench plan --save`` writes it."""

from dataclasses import dataclass
from pathlib import Path

from ckbench.errors import OtherDepth
from ckbench.plan import Plan, StackShape
from ckbench.planfile import read_plan


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """The plan that FILE holds, written by ``ckbench plan --save`` or by hand. Block forwards in backward: as it says.

    Others say: ckptplan's plan file.
    """

    file: str

    def plan(self, stack: StackShape) -> Plan:
        """Read the file. Raises PlanError where it cannot be read, OtherDepth where it is for another depth."""
        plan = read_plan(Path(self.file))
        if plan.n_layers != stack.n_layers:
            raise OtherDepth(f"{self.file} is a plan for {plan.n_layers} blocks, the model has {stack.n_layers}")
        return plan


PLUGIN = StoredPlan

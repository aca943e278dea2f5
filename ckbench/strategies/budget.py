"""budget:SIZE: the fastest plan whose peak fits a budget, as the planner finds it."""

from dataclasses import dataclass
from typing import ClassVar

from ckbench.cards import read_budget
from ckbench.errors import ConfigError, NotYetMeasured, PlanError
from ckbench.plan import Plan, StackShape


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The fastest plan whose peak is at most SIZE: bytes (16GiB), or a share of what none takes (80%).

    Each block is kept, recomputed, kept in part by its operations, or lies in a segment, nested or not; which, is
    decided by dynamic programming over exact bytes and counted or measured seconds (``ckbench plan``).
    Others say: automatic checkpointing, Checkmate, rotor, auto-SAC.
    """

    takes_options: ClassVar[bool] = False
    size: str

    def plan(self, stack: StackShape) -> Plan:
        """Raise NotYetMeasured: the planner needs the whole trial, so it decides before the trial starts.

        Raises PlanError for a budget that says nothing.
        """
        try:
            read_budget(self.size, none_peak_bytes=1)
        except ConfigError as error:
            raise PlanError(str(error)) from None
        raise NotYetMeasured("the plan for a budget is found by the planner, from the whole trial")


PLUGIN = Budget

"""compile-budget:X: torch.compile decides inside each block what to keep, for a share X of its activations."""

from dataclasses import dataclass

from ckbench.errors import PlanError
from ckbench.plan import Plan, StackShape


@dataclass(frozen=True, kw_only=True)
class CompileBudget:
    """Compile every block with ``activation_memory_budget`` X: 1 keeps what the compiler keeps by default, 0 keeps the
    block's input alone, and between them its partitioner solves a knapsack of bytes against FLOPs.

    The blocks are compiled whatever ``train.compile`` says; parity is against ``none``, compiled. With dropout and X
    below 1 PyTorch (seen in 2.13) draws other masks in the recomputation, so gradients are wrong and the row is
    invalid: pytorch issue 190758.
    Others say: torchtitan memory-budget.
    """

    budget: float

    def plan(self, stack: StackShape) -> Plan:
        """Leave the decision to the compiler. Raises PlanError for a share outside 0 to 1."""
        if not 0 <= self.budget <= 1:
            raise PlanError(f"the budget is a share of the activations, from 0 to 1, got {self.budget:g}")
        return Plan(n_layers=stack.n_layers, compile_budget=self.budget)


PLUGIN = CompileBudget

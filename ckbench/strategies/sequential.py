"""sequential:N: the cut of torch.utils.checkpoint.checkpoint_sequential."""

from dataclasses import dataclass

from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, StackShape


@dataclass(frozen=True, kw_only=True)
class Sequential:
    """Recompute N - 1 spans of floor(L/N) blocks; what is left, at least as long, keeps everything.

    Kept: (N-1)·b + (L - (N-1)·floor(L/N))·a + h. Block forwards in backward: (N-1)·floor(L/N). The order of work is
    that of PyTorch's function (2.9 to 2.13), so it computes the same bit by bit.
    """

    n: int

    def plan(self, stack: StackShape) -> Plan:
        """Cut as PyTorch does. Raises PlanError for N above L, where its function fails too."""
        length = stack.n_layers // self.n
        if length == 0:
            raise PlanError(
                f"{stack.n_layers} blocks cannot be cut into {self.n} segments (PyTorch's checkpoint_sequential "
                f"fails there); write at most {stack.n_layers}"
            )
        starts = range(0, length * (self.n - 1), length)
        return Plan(n_layers=stack.n_layers, regions=tuple(Region(start=i, stop=i + length) for i in starts))


PLUGIN = Sequential

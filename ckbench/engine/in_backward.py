"""Update each parameter while backward runs, as soon as its gradient is whole, and free the gradient.

A parameter's gradient is whole when autograd has added up all its uses, so one that is tied or shared is updated
once, behind its last use. What a checkpoint region recomputes is there before the first gradient of the region is,
so no recomputation sees updated weights. Reentrant regions are backward passes of their own: each would bring a
shared parameter's share by itself, and the second of them is refused.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ckbench.errors import ConfigError


class InBackward:
    """One optimizer per parameter, run by hooks."""

    def __init__(self, parameters: Sequence[Tensor], make: Callable[[Sequence[Tensor]], torch.optim.Optimizer]) -> None:
        self._by_parameter = {id(parameter): make([parameter]) for parameter in parameters}
        self._updated: set[int] = set()
        # The hook must not hold what holds the parameters: such a cycle would keep a released model alive.
        me = weakref.ref(self)

        def update(parameter: Tensor) -> None:
            owner = me()
            if owner is not None:
                owner.update(parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(update)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One per parameter, in the order they were given."""
        return list(self._by_parameter.values())

    def update(self, parameter: Tensor) -> None:
        """Update one parameter and free its gradient. Raises ConfigError at the second gradient of a step."""
        if id(parameter) in self._updated:
            raise ConfigError(
                f"optimizer_in_backward got a second gradient for a shared parameter {tuple(parameter.shape)}, as "
                "reentrant checkpoints give it; use the default variant"
            )
        self._updated.add(id(parameter))
        self._by_parameter[id(parameter)].step()
        parameter.grad = None

    def end_step(self) -> int:
        """Count the parameters updated since the last call."""
        n_updated = len(self._updated)
        self._updated.clear()
        return n_updated

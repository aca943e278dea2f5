"""Apply a plan to a model of one's own, outside of ckbench's runs: ``ckbench.apply_plan``."""

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckbench.engine.checkpointing import AppliedPlan
from ckbench.errors import PlanError
from ckbench.models._locate import find_blocks, locate
from ckbench.models.base import BuiltModel
from ckbench.plan import Plan
from ckbench.planfile import plan_of_data, read_plan

_in_force: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class Applied:
    """A plan in force on a model; as a context manager it ends with the block."""

    def __init__(self, plan: Plan, blocks: str, built: BuiltModel) -> None:
        self.plan = plan
        self.blocks = blocks
        """Path of the list of blocks inside the model."""
        self._built = built
        self._applied = _apply(built, plan)
        self._hook: Any = None
        if any(region.n_blocks > 1 for region in plan.walk()):
            self._hook = built.module.register_forward_pre_hook(self._look, with_kwargs=True)
        _in_force.add(built.module)

    @property
    def block_calls_backward(self) -> tuple[int, ...]:
        """How often each block's forward has started in backward since the plan was applied; all 0: no effect."""
        return tuple(self._applied.counts.block_calls_backward)

    def remove(self) -> None:
        """Give every module its own forward back."""
        self._applied.remove()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        _in_force.discard(self._built.module)

    def _look(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Run the first training pass once more before it, without gradients and without the plan: does each block's
        output go straight into the next block, and nowhere else? A region over several blocks hands nothing else on.
        """
        if not torch.is_grad_enabled():
            return
        self.remove()
        apart = locate(model, lambda: model(*args, **kwargs), blocks=self.blocks).apart
        if apart:
            raise PlanError(f"a region cannot span several blocks of this model: {apart}; the plan is taken off")
        self._applied = _apply(self._built, self.plan)
        _in_force.add(model)

    def __enter__(self) -> "Applied":
        return self

    def __exit__(self, *_error: object) -> None:
        self.remove()


def _apply(built: BuiltModel, plan: Plan) -> AppliedPlan:
    """Apply a plan where no step of ours says when backward runs."""
    applied = AppliedPlan(built, plan)
    counts = applied.counts
    entered = counts.enter_block

    def enter_block(index: int) -> None:
        counts.in_backward = _is_in_backward()
        entered(index)

    counts.enter_block = enter_block  # type: ignore[method-assign]
    return applied


def apply_plan(
    model: nn.Module, plan: str | os.PathLike[str] | Plan | Mapping[str, Any], *, blocks: str | None = None
) -> Applied:
    """Have a model recompute what a plan says, in every training step from now on, until ``remove`` is called.

    ``plan``: a file that ``ckbench plan --save`` wrote, a Plan, or a plan as plain data. ``blocks``: dotted path of the
    list of blocks inside the model; left out, the longest list of modules of one class. Weights, hooks and the model's
    own code stay as they are; evaluation (without gradients) runs plainly.

        applied = ckbench.apply_plan(model, "plan.yaml")
        for inputs, targets in loader:
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    A region over several blocks is proven on the first training pass, by another one without gradients before it.

    Raises PlanError where the plan is for another number of blocks, cannot be read, or covers parts of blocks, which
    only ckbench's own runs can find; ConfigError where no blocks are found.
    """
    if isinstance(plan, str | os.PathLike):
        plan = read_plan(Path(plan))
    elif isinstance(plan, Mapping):
        plan = plan_of_data(plan)
    if model in _in_force:
        raise PlanError("a plan is in force on this model already; call remove() on what apply_plan gave")
    path, found = find_blocks(model, blocks)
    if plan.n_layers != len(found):
        raise PlanError(f"the plan is for {plan.n_layers} blocks, {path} has {len(found)}")
    if any(region.part != "block" for region in plan.walk()) or plan.native:
        raise PlanError("this plan covers parts of blocks, or leaves it to the library; apply a plan of whole blocks")
    built = BuiltModel(module=model, blocks=found, parts=tuple({} for _ in found))
    return Applied(plan, path, built)


def _is_in_backward() -> bool:
    """Tell whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1

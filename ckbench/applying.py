"""Apply a plan to a model of one's own, outside of ckbench's runs: ``ckbench.apply_plan``."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckbench.errors import PlanError
from ckbench.plan import Plan, plan_from_json
from ckbench.planfile import read_plan

if TYPE_CHECKING:
    from torch import nn

    from ckbench.engine.checkpointing import AppliedPlan


class Applied:
    """A plan in force on a model; as a context manager it ends with the block."""

    def __init__(self, plan: Plan, blocks: str, applied: "AppliedPlan") -> None:
        self.plan = plan
        self.blocks = blocks
        """Path of the list of blocks inside the model."""
        self._applied = applied

    @property
    def block_calls_backward(self) -> tuple[int, ...]:
        """How often each block's forward has started in backward since the plan was applied; all 0: no effect."""
        return tuple(self._applied.counts.block_calls_backward)

    def remove(self) -> None:
        """Give every module its own forward back."""
        self._applied.remove()

    def __enter__(self) -> "Applied":
        return self

    def __exit__(self, *_error: object) -> None:
        self.remove()


def apply_plan(
    model: "nn.Module", plan: str | os.PathLike[str] | Plan | Mapping[str, Any], *, blocks: str | None = None
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

    Raises PlanError where the plan is for another number of blocks, cannot be read, or covers parts of blocks, which
    only ckbench's own runs can find; ConfigError where no blocks are found.
    """
    from ckbench.engine.checkpointing import AppliedPlan
    from ckbench.models._locate import find_blocks
    from ckbench.models.base import BuiltModel

    if isinstance(plan, str | os.PathLike):
        plan = read_plan(Path(plan))
    elif isinstance(plan, Mapping):
        plan = plan_from_json(dict(plan))
    path, found = find_blocks(model, blocks)
    if plan.n_layers != len(found):
        raise PlanError(f"the plan is for {plan.n_layers} blocks, {path} has {len(found)}")
    if any(region.part != "block" for region in plan.walk()) or plan.native:
        raise PlanError("this plan covers parts of blocks, or leaves it to the library; apply a plan of whole blocks")
    built = BuiltModel(module=model, blocks=found, parts=tuple({} for _ in found))
    applied = AppliedPlan(built, plan)
    counts = applied.counts
    entered = counts.enter_block

    def enter_block(index: int) -> None:
        counts.in_backward = _is_in_backward()
        entered(index)

    counts.enter_block = enter_block  # type: ignore[method-assign]
    return Applied(plan, path, applied)


def _is_in_backward() -> bool:
    """Tell whether autograd is running a backward pass in this thread."""
    import torch

    return torch._C._current_graph_task_id() != -1

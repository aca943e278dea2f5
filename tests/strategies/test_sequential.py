"""sequential:N: N - 1 spans of floor(L/N) blocks; the rest keeps everything."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from ckbench import specs
from ckbench.config import RunConfig
from ckbench.devices.base import Holdings, Observer
from ckbench.devices.cpu import Cpu
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.errors import PlanError
from ckbench.models.gpt import build
from ckbench.plan import Plan, Region, StackShape

PlanOf = Callable[[str, int], Plan]
Spans = Callable[[Plan], list[tuple[int, int]]]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    assert plan_of("sequential:3", 7) == Plan(n_layers=7, regions=(Region(start=0, stop=2), Region(start=2, stop=4)))


@pytest.mark.parametrize(
    ("n_layers", "n", "expected"),
    [(6, 1, []), (1, 1, []), (6, 2, [(0, 3)]), (5, 2, [(0, 2)]), (5, 5, [(0, 1), (1, 2), (2, 3), (3, 4)]), (5, 4, [(0, 1), (1, 2), (2, 3)])],
)  # fmt: skip
def test_spans(plan_of: PlanOf, spans: Spans, n_layers: int, n: int, expected: list[tuple[int, int]]) -> None:
    plan = plan_of(f"sequential:{n}", n_layers)
    assert spans(plan) == expected
    assert sum(plan.block_calls_backward()) == (n - 1) * (n_layers // n)


def test_one_segment_is_none(plan_of: PlanOf) -> None:
    """PyTorch's last segment is never checkpointed, and here it is the only one."""
    assert plan_of("sequential:1", 6) == plan_of("none", 6)


def test_more_segments_than_blocks_are_refused_as_pytorch_refuses_them(plan_of: PlanOf) -> None:
    with pytest.raises(PlanError) as told:
        plan_of("sequential:6", 5)
    assert str(told.value) == (
        "5 blocks cannot be cut into 6 segments (PyTorch's checkpoint_sequential fails there); write at most 5"
    )


class Trace:
    """What one training step of a stack kept and ran."""

    def __init__(self, run: Callable[[nn.Sequential, Tensor], Tensor], blocks: nn.Sequential) -> None:
        self.starts = [[0, 0] for _ in blocks]
        self.saved = 0
        turned = False

        def count(i: int) -> Callable[..., None]:
            def counted(*_: Any) -> None:
                self.starts[i][turned] += 1

            return counted

        handles = [block.norm_1.register_forward_pre_hook(count(i)) for i, block in enumerate(blocks)]
        torch.manual_seed(5)
        x = torch.randn(2, 16, 32, requires_grad=True)
        device = Cpu("cpu", 1)

        class Step:
            """One pass through the stack, weighed as the harness weighs a trial."""

            executed_steps = skipped_steps = 0
            phase = "forward"

            def holdings(self) -> Holdings:
                held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (x, *blocks.parameters())}
                return Holdings(static=held, gradients={}, inputs={})

            def observed_step(step, observer: Observer) -> None:
                nonlocal turned
                observer.at("forward")
                y = run(blocks, x)
                observer.at("head")
                loss = y.square().sum()
                observer.at("turn")
                turned = True
                self.gradients = torch.autograd.grad(loss, [x, *blocks.parameters()])
                observer.at("blocks")
                observer.at("optimizer")
                observer.at("end")

        gc.collect()  # what other tests left must not be freed while this is weighed
        self.saved = device.weigh(Step())["saved_bytes"]  # type: ignore[arg-type]
        for handle in handles:
            handle.remove()
        self.random = torch.rand(3)


@pytest.mark.parametrize(("n_layers", "n"), [(5, 1), (5, 2), (6, 3), (7, 3), (5, 5)])
def test_it_is_what_pytorch_does(tiny_run: Callable[..., RunConfig], n_layers: int, n: int) -> None:
    """PyTorch's own function on the same blocks: the same bytes kept, blocks run and gradients, bit by bit."""
    config = tiny_run("none", model={"n_layers": n_layers, "dropout": 0.1})
    model = build(config.model, 16)
    stack = nn.Sequential(*model.blocks)
    theirs = Trace(lambda blocks, x: checkpoint_sequential(blocks, n, x, use_reentrant=False), stack)
    plan = specs.resolve(specs.parse(f"sequential:{n}"), StackShape(n_layers=n_layers))
    applied = AppliedPlan(model, plan)
    ours = Trace(lambda blocks, x: blocks(x), stack)
    assert theirs.saved == ours.saved > 0
    assert theirs.starts == ours.starts == [[1, calls] for calls in plan.block_calls_backward()]
    assert all(torch.equal(a, b) for a, b in zip(theirs.gradients, ours.gradients, strict=True))
    assert torch.equal(theirs.random, ours.random)
    applied.remove()


def test_pytorch_fails_for_more_segments_than_blocks() -> None:
    with pytest.raises(ValueError):
        checkpoint_sequential(nn.Sequential(nn.Linear(2, 2)), 2, torch.ones(1, 2), use_reentrant=False)

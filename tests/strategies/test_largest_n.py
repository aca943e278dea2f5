"""largest-n:N: the blocks with most measured bytes, earlier ones first where they are equal."""

from collections.abc import Callable

import pytest
import torch

from ckbench import specs
from ckbench.config import RunConfig
from ckbench.engine.trial import Trial
from ckbench.errors import NotYetMeasured
from ckbench.plan import Plan, StackShape

PlanOf = Callable[[str, int], Plan]
Spans = Callable[[Plan], list[tuple[int, int]]]


def resolved(spec: str, *sizes: int) -> Plan:
    return specs.resolve(specs.parse(spec), StackShape(n_layers=len(sizes), block_saved_bytes=sizes))


def test_the_largest_are_chosen(spans: Spans) -> None:
    plan = resolved("largest-n:2", 10, 90, 20, 80, 30)
    assert spans(plan) == [(1, 2), (3, 4)]
    assert plan.block_calls_backward() == (0, 1, 0, 1, 0)


def test_equal_blocks_are_taken_from_the_front(spans: Spans) -> None:
    assert spans(resolved("largest-n:2", 5, 5, 5, 5)) == [(0, 1), (1, 2)]
    assert spans(resolved("largest-n:2", 5, 7, 5, 5)) == [(0, 1), (1, 2)]
    assert spans(resolved("largest-n:2", 1, 5, 5, 5)) == [(1, 2), (2, 3)]


def test_n_above_the_depth_is_per_block(plan_of: PlanOf) -> None:
    assert resolved("largest-n:9", 1, 3, 2) == plan_of("per-block", 3)
    assert resolved("largest-n:3", 1, 3, 2) == plan_of("per-block", 3)


def test_without_figures_it_waits_for_them(plan_of: PlanOf) -> None:
    with pytest.raises(NotYetMeasured, match="^which blocks keep most is known once the model is built$"):
        plan_of("largest-n:2", 4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trial_measures_and_chooses_the_widest(
    tiny_run: Callable[..., RunConfig], spans: Spans, precision: str
) -> None:
    model = {"n_layers": 5, "d_ff": (16, 128, 32, 128, 64)}
    trial = Trial(tiny_run("largest-n:3", model=model, train={"precision": precision}), torch.device("cpu"))
    assert spans(trial.applied.plan) == [(1, 2), (3, 4), (4, 5)]

"""ffn-only: one part of every block, each by itself; no block runs again as a whole."""

from collections.abc import Callable

import pytest

from ckbench import specs
from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, StackShape

PlanOf = Callable[[str, int], Plan]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    regions = (Region(start=0, stop=1, part="ffn"), Region(start=1, stop=2, part="ffn"))
    assert plan_of("ffn-only", 2) == Plan(n_layers=2, regions=regions)


@pytest.mark.parametrize("n_layers", [1, 5])
def test_the_part_runs_once_more_and_no_block_does(plan_of: PlanOf, n_layers: int) -> None:
    plan = plan_of("ffn-only", n_layers)
    assert plan.block_calls_backward() == (0,) * n_layers
    assert plan.part_calls_backward("ffn") == plan.region_calls_backward() == n_layers
    assert plan.part_calls_backward("attention") == 0


def test_skip_last(plan_of: PlanOf) -> None:
    assert plan_of("ffn-only,skip_last", 3).part_calls_backward("ffn") == 2
    assert plan_of("ffn-only,skip_last", 1) == plan_of("none", 1)


def test_blocks_without_the_part_are_refused() -> None:
    stack = StackShape(n_layers=2, parts=frozenset({"attention"}))
    with pytest.raises(PlanError) as told:
        specs.resolve(specs.parse("ffn-only"), stack)
    assert str(told.value) == "the blocks of this model have no ffn part to checkpoint"


def test_reentrant_is_refused() -> None:
    with pytest.raises(PlanError) as told:
        specs.resolve(specs.parse("ffn-only,reentrant"), StackShape(n_layers=2))
    assert str(told.value) == (
        "reentrant checkpoints of a part of a block sum gradients in another order; drop reentrant"
    )

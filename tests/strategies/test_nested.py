"""nested:K: per-block regions inside regions of K blocks; 2L - ceil(L/K) block forwards in backward."""

import math
from collections.abc import Callable

import pytest

from ckbench import specs
from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, StackShape

PlanOf = Callable[[str, int], Plan]
Spans = Callable[[Plan], list[tuple[int, int]]]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    first = Region(start=0, stop=2, children=(Region(start=0, stop=1), Region(start=1, stop=2)))
    second = Region(start=2, stop=4, children=(Region(start=2, stop=3), Region(start=3, stop=4)))
    assert plan_of("nested:2", 4) == Plan(n_layers=4, regions=(first, second))


def test_a_span_of_one_block_is_one_region(plan_of: PlanOf, spans: Spans) -> None:
    plan = plan_of("nested:3", 7)
    assert spans(plan) == [(0, 3), (3, 6), (6, 7)]
    assert plan.regions[-1] == Region(start=6, stop=7)


def test_degenerate_k(plan_of: PlanOf, spans: Spans) -> None:
    assert plan_of("nested:1", 5) == plan_of("per-block", 5)
    assert plan_of("nested:9", 1) == plan_of("per-block", 1)
    assert spans(plan_of("nested:9", 4)) == [(0, 4)]
    assert plan_of("nested:9", 4) == plan_of("nested:4", 4)


def test_block_calls_by_hand(plan_of: PlanOf) -> None:
    assert plan_of("nested:3", 6).block_calls_backward() == (2, 2, 1, 2, 2, 1)
    assert plan_of("nested:3,early_stop=false", 6).block_calls_backward() == (2,) * 6


@pytest.mark.parametrize(("n_layers", "k"), [(1, 1), (1, 4), (6, 2), (6, 3), (7, 3), (8, 4), (5, 8), (12, 5)])
def test_kept_and_recomputed(plan_of: PlanOf, n_layers: int, k: int) -> None:
    plan = plan_of(f"nested:{k}", n_layers)
    assert len(plan.regions) == math.ceil(n_layers / k)
    assert sum(plan.block_calls_backward()) == 2 * n_layers - math.ceil(n_layers / k)


def test_region_starts_by_hand(plan_of: PlanOf) -> None:
    """Three blocks: the parent replays (1), which starts its first two children (2), then all three replay (3)."""
    assert plan_of("nested:3", 3).region_calls_backward() == 1 + 2 + 3
    assert plan_of("nested:3,early_stop=false", 3).region_calls_backward() == 1 + 3 + 3


def test_skip_last_keeps_the_parent(plan_of: PlanOf) -> None:
    plan = plan_of("nested:2,skip_last", 4)
    assert plan.regions[0] == plan_of("nested:2", 4).regions[0]
    assert plan.regions[1] == Region(start=2, stop=4, children=(Region(start=2, stop=3),))
    assert plan.block_calls_backward() == (2, 1, 2, 1)


def test_reentrant_is_refused() -> None:
    with pytest.raises(PlanError) as told:
        specs.resolve(specs.parse("nested:2,reentrant"), StackShape(n_layers=4))
    assert str(told.value) == "reentrant checkpoints cannot be nested; drop reentrant or choose a flat strategy"

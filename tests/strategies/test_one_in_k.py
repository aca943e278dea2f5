"""one-in-k:K: blocks 0, K, 2K, ... each by itself; the others keep everything."""

import math
from collections.abc import Callable

import pytest

from ckbench.plan import Plan, Region

PlanOf = Callable[[str, int], Plan]
Spans = Callable[[Plan], list[tuple[int, int]]]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    assert plan_of("one-in-k:2", 4) == Plan(n_layers=4, regions=(Region(start=0, stop=1), Region(start=2, stop=3)))


def test_k_that_does_not_divide(plan_of: PlanOf, spans: Spans) -> None:
    assert spans(plan_of("one-in-k:3", 7)) == [(0, 1), (3, 4), (6, 7)]


def test_k_above_the_depth_leaves_the_first_block(plan_of: PlanOf, spans: Spans) -> None:
    assert spans(plan_of("one-in-k:9", 4)) == [(0, 1)]
    assert spans(plan_of("one-in-k:9", 1)) == [(0, 1)]


def test_k_of_one_is_per_block(plan_of: PlanOf) -> None:
    assert plan_of("one-in-k:1", 5) == plan_of("per-block", 5)


@pytest.mark.parametrize(("n_layers", "k"), [(1, 1), (6, 2), (7, 3), (5, 8), (12, 5)])
def test_kept_and_recomputed(plan_of: PlanOf, n_layers: int, k: int) -> None:
    plan = plan_of(f"one-in-k:{k}", n_layers)
    assert sum(plan.block_calls_backward()) == len(plan.regions) == math.ceil(n_layers / k)
    assert plan.block_calls_backward() == tuple(int(i % k == 0) for i in range(n_layers))


def test_skip_last_drops_the_last_picked_block(plan_of: PlanOf, spans: Spans) -> None:
    assert spans(plan_of("one-in-k:2,skip_last", 4)) == [(0, 1)]

"""every-k:K: regions of K consecutive blocks, the last one shorter; every block runs once more."""

import math
from collections.abc import Callable

import pytest

from ckbench.plan import Plan, Region

PlanOf = Callable[[str, int], Plan]
Spans = Callable[[Plan], list[tuple[int, int]]]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    assert plan_of("every-k:2", 4) == Plan(n_layers=4, regions=(Region(start=0, stop=2), Region(start=2, stop=4)))


def test_the_last_region_may_be_shorter(plan_of: PlanOf, spans: Spans) -> None:
    assert spans(plan_of("every-k:3", 7)) == [(0, 3), (3, 6), (6, 7)]


def test_k_above_the_depth_is_one_region(plan_of: PlanOf) -> None:
    assert plan_of("every-k:9", 4) == plan_of("full", 4)
    assert plan_of("every-k:9", 1) == plan_of("per-block", 1)


def test_k_of_one_is_per_block(plan_of: PlanOf) -> None:
    assert plan_of("every-k:1", 5) == plan_of("per-block", 5)


@pytest.mark.parametrize(("n_layers", "k"), [(1, 1), (6, 2), (7, 3), (5, 8), (12, 5)])
def test_kept_and_recomputed(plan_of: PlanOf, n_layers: int, k: int) -> None:
    plan = plan_of(f"every-k:{k}", n_layers)
    assert len(plan.regions) == math.ceil(n_layers / k)
    assert sum(plan.block_calls_backward()) == n_layers


def test_skip_last_drops_the_last_region(plan_of: PlanOf, spans: Spans) -> None:
    plan = plan_of("every-k:3,skip_last", 7)
    assert spans(plan) == [(0, 3), (3, 6)]
    assert plan.block_calls_backward() == (1, 1, 1, 1, 1, 1, 0)

"""first-n:N: the first N blocks, each by itself."""

from collections.abc import Callable

import pytest

from ckbench.plan import Plan, Region

PlanOf = Callable[[str, int], Plan]
Spans = Callable[[Plan], list[tuple[int, int]]]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    assert plan_of("first-n:2", 4) == Plan(n_layers=4, regions=(Region(start=0, stop=1), Region(start=1, stop=2)))


def test_n_above_the_depth_is_per_block(plan_of: PlanOf) -> None:
    assert plan_of("first-n:9", 4) == plan_of("per-block", 4)
    assert plan_of("first-n:9", 1) == plan_of("per-block", 1)


@pytest.mark.parametrize(("n_layers", "n"), [(1, 1), (6, 4), (5, 8)])
def test_kept_and_recomputed(plan_of: PlanOf, n_layers: int, n: int) -> None:
    plan = plan_of(f"first-n:{n}", n_layers)
    assert plan.block_calls_backward() == tuple(int(i < n) for i in range(n_layers))
    assert plan.n_regions == min(n, n_layers)


def test_skip_last(plan_of: PlanOf, spans: Spans) -> None:
    assert spans(plan_of("first-n:3,skip_last", 6)) == [(0, 1), (1, 2)]
    assert plan_of("first-n:1,skip_last", 6) == plan_of("none", 6)

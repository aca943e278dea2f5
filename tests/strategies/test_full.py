"""full: the whole stack as one region; only its input is kept."""

from collections.abc import Callable

import pytest

from ckbench.plan import Plan, Region

PlanOf = Callable[[str, int], Plan]


@pytest.mark.parametrize("n_layers", [1, 2, 7])
def test_plan_by_hand(plan_of: PlanOf, n_layers: int) -> None:
    plan = plan_of("full", n_layers)
    assert plan == Plan(n_layers=n_layers, regions=(Region(start=0, stop=n_layers),))
    assert plan.block_calls_backward() == (1,) * n_layers
    assert plan.region_calls_backward() == 1


def test_skip_last_leaves_nothing(plan_of: PlanOf) -> None:
    assert plan_of("full,skip_last", 5) == plan_of("none", 5)

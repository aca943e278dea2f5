"""compile-budget:X: no regions of ours; a share from 0 to 1 for the compiler."""

from collections.abc import Callable

import pytest

from ckbench.errors import PlanError
from ckbench.plan import Plan

PlanOf = Callable[[str, int], Plan]


@pytest.mark.parametrize("budget", [0.0, 0.25, 1.0])
def test_plan_by_hand(plan_of: PlanOf, budget: float) -> None:
    plan = plan_of(f"compile-budget:{budget}", 4)
    assert plan == Plan(n_layers=4, compile_budget=budget)
    assert plan.is_active and plan.n_regions == 0


def test_whole_numbers_are_shares_too(plan_of: PlanOf) -> None:
    assert plan_of("compile-budget:1", 4) == plan_of("compile-budget:1.0", 4)


def test_a_share_above_one_is_refused(plan_of: PlanOf) -> None:
    with pytest.raises(PlanError, match="^the budget is a share of the activations, from 0 to 1, got 1.5$"):
        plan_of("compile-budget:1.5", 4)


def test_it_takes_no_offload(plan_of: PlanOf) -> None:
    with pytest.raises(PlanError, match="^compile-budget decides inside the library or the compiler; offload cannot"):
        plan_of("compile-budget:0.5,offload", 4)

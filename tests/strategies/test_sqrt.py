"""sqrt: round(sqrt(L)) near-equal regions."""

from collections.abc import Callable

import pytest

from ckbench.plan import Plan, Region

PlanOf = Callable[[str, int], Plan]
Spans = Callable[[Plan], list[tuple[int, int]]]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    assert plan_of("sqrt", 5) == Plan(n_layers=5, regions=(Region(start=0, stop=3), Region(start=3, stop=5)))


@pytest.mark.parametrize(
    ("n_layers", "n_regions"),
    [(1, 1), (2, 1), (3, 2), (4, 2), (6, 2), (7, 3), (9, 3), (12, 3), (13, 4), (20, 4), (21, 5), (48, 7)],
)
def test_rounds_the_root_to_the_nearest(plan_of: PlanOf, n_layers: int, n_regions: int) -> None:
    plan = plan_of("sqrt", n_layers)
    assert len(plan.regions) == n_regions == round(n_layers**0.5)
    assert plan == plan_of(f"segments:{n_regions}", n_layers)
    assert sum(plan.block_calls_backward()) == n_layers


def test_skip_last(plan_of: PlanOf, spans: Spans) -> None:
    assert spans(plan_of("sqrt,skip_last", 9)) == [(0, 3), (3, 6)]
    assert plan_of("sqrt,skip_last", 2) == plan_of("none", 2)

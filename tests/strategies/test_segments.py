"""segments:N: N regions whose lengths differ by at most one, longer ones first."""

from collections.abc import Callable

import pytest

from ckbench.plan import Plan, Region

PlanOf = Callable[[str, int], Plan]
Spans = Callable[[Plan], list[tuple[int, int]]]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    assert plan_of("segments:2", 5) == Plan(n_layers=5, regions=(Region(start=0, stop=3), Region(start=3, stop=5)))


def test_lengths_differ_by_at_most_one(plan_of: PlanOf, spans: Spans) -> None:
    assert spans(plan_of("segments:4", 10)) == [(0, 3), (3, 6), (6, 8), (8, 10)]


def test_n_above_the_depth_is_per_block(plan_of: PlanOf) -> None:
    assert plan_of("segments:9", 4) == plan_of("per-block", 4)
    assert plan_of("segments:9", 1) == plan_of("per-block", 1)


def test_one_segment_is_full(plan_of: PlanOf) -> None:
    assert plan_of("segments:1", 6) == plan_of("full", 6)


@pytest.mark.parametrize(("n_layers", "n"), [(1, 1), (6, 4), (7, 3), (12, 5)])
def test_kept_and_recomputed(plan_of: PlanOf, n_layers: int, n: int) -> None:
    plan = plan_of(f"segments:{n}", n_layers)
    assert len(plan.regions) == n
    assert plan.block_calls_backward() == (1,) * n_layers


def test_skip_last_drops_the_last_segment(plan_of: PlanOf, spans: Spans) -> None:
    assert spans(plan_of("segments:3,skip_last", 7)) == [(0, 3), (3, 5)]

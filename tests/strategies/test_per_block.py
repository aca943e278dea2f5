"""per-block: one region per block; each block runs once more."""

from collections.abc import Callable

from ckbench.plan import Plan, Region

PlanOf = Callable[[str, int], Plan]
Spans = Callable[[Plan], list[tuple[int, int]]]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    assert plan_of("per-block", 3) == Plan(
        n_layers=3, regions=(Region(start=0, stop=1), Region(start=1, stop=2), Region(start=2, stop=3))
    )


def test_one_block(plan_of: PlanOf, spans: Spans) -> None:
    assert spans(plan_of("per-block", 1)) == [(0, 1)]


def test_every_block_runs_once_more(plan_of: PlanOf) -> None:
    for options in ("", ",early_stop=false"):
        plan = plan_of("per-block" + options, 6)
        assert plan.block_calls_backward() == (1,) * 6
        assert plan.region_calls_backward() == plan.n_regions == 6


def test_skip_last(plan_of: PlanOf, spans: Spans) -> None:
    plan = plan_of("per-block,skip_last", 4)
    assert spans(plan) == [(0, 1), (1, 2), (2, 3)]
    assert plan.block_calls_backward() == (1, 1, 1, 0)
    assert plan_of("per-block,skip_last", 1) == plan_of("none", 1)

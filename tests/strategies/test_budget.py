"""budget:SIZE: a size is read at once, its plan is the planner's."""

from collections.abc import Callable

import pytest

from ckbench import specs
from ckbench.config import RunConfig
from ckbench.errors import ConfigError, NotYetMeasured, PlanError
from ckbench.plan import Plan, Region

PlanOf = Callable[[str, int], Plan]


@pytest.mark.parametrize("size", ["16GiB", "80%", "12.5%", "A100 40GB", "a100-40gb", "500 MiB"])
def test_a_spec_is_what_it_is_typed_as(plan_of: PlanOf, size: str) -> None:
    spec = specs.parse(f"budget:{size}")
    assert spec.label == f"budget:{size}" and spec.params == {"size": size}
    assert specs.parse({"name": "budget", "size": size}) == spec
    with pytest.raises(NotYetMeasured, match="^the plan for a budget is found by the planner, from the whole trial$"):
        plan_of(f"budget:{size}", 4)


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ("16", "'16' has no unit"),
        ("0%", "budget '0%': a share lies above 0 and goes up to 100%"),
        ("120%", "budget '120%': a share lies above 0"),
        ("banana", "unknown card 'banana'"),
    ],
)
def test_what_is_no_size_is_refused_before_any_trial(plan_of: PlanOf, size: str, told: str) -> None:
    with pytest.raises(PlanError, match=f"^{told}") as caught:
        plan_of(f"budget:{size}", 4)
    assert not isinstance(caught.value, NotYetMeasured)


def test_it_needs_a_size_and_takes_no_option() -> None:
    with pytest.raises(ConfigError, match="^strategy budget needs size; write budget:SIZE$"):
        specs.parse("budget")
    for option in ("skip_last", "early_stop=false", "offload"):
        with pytest.raises(ConfigError, match="^strategy budget decides all of its plan, so .* has no effect$"):
            specs.parse(f"budget:80%,{option}")


def test_two_budgets_are_two_configurations(tiny_run: Callable[..., RunConfig]) -> None:
    one, other = (tiny_run(f"budget:{size}") for size in ("80%", "60%"))
    assert one.configuration_id() != other.configuration_id()
    plan = Plan(n_layers=4, regions=(Region(start=0, stop=1),))
    planned = one.model_copy(update={"plan": plan.to_json()})
    assert planned.configuration_id() == one.configuration_id()


def test_a_trial_runs_the_planner_s_plan(tiny_run: Callable[..., RunConfig]) -> None:
    import torch

    from ckbench.engine.trial import NoObserver, Trial, baseline_config

    plan = Plan(n_layers=4, regions=(Region(start=1, stop=3), Region(start=3, stop=4)))
    config = tiny_run("budget:80%").model_copy(update={"plan": plan.to_json()})
    trial = Trial(config, torch.device("cpu"))
    assert trial.applied.plan == plan
    trial.step(NoObserver())
    assert trial.applied.counts.block_calls_backward == list(plan.block_calls_backward())
    assert baseline_config(config).plan is None, "none is measured under none"

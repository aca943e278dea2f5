"""none: no regions, whatever the depth, and no options to act on."""

from collections.abc import Callable

import pytest

from ckbench import specs
from ckbench.errors import ConfigError
from ckbench.plan import Plan

PlanOf = Callable[[str, int], Plan]


@pytest.mark.parametrize("n_layers", [1, 2, 7])
def test_keeps_everything(plan_of: PlanOf, n_layers: int) -> None:
    plan = plan_of("none", n_layers)
    assert plan == Plan(n_layers=n_layers)
    assert plan.n_regions == 0
    assert plan.block_calls_backward() == (0,) * n_layers
    assert plan.region_calls_backward() == 0
    assert plan.without_last_leaf() == plan


def test_takes_no_options_and_no_argument() -> None:
    with pytest.raises(ConfigError) as told:
        specs.parse("none,skip_last,early_stop=false")
    assert str(told.value) == "strategy none recomputes nothing, so early_stop, skip_last has no effect"
    with pytest.raises(ConfigError) as told:
        specs.parse("none:2")
    assert str(told.value) == "strategy none takes no argument, got '2'"

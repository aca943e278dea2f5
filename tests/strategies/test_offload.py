"""offload: nothing is recomputed, everything waits on the host; as an option it does the same to what regions keep."""

from collections.abc import Callable

import pytest

from ckbench import specs
from ckbench.errors import ConfigError, PlanError
from ckbench.plan import Plan, Region, StackShape

PlanOf = Callable[[str, int], Plan]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    assert plan_of("offload", 3) == Plan(n_layers=3, offload=True)
    assert plan_of("offload", 3).is_active and not plan_of("none", 3).is_active


def test_nothing_is_recomputed(plan_of: PlanOf) -> None:
    plan = plan_of("offload", 4)
    assert plan.block_calls_backward() == (0, 0, 0, 0)
    assert plan.n_regions == plan.region_calls_backward() == 0


def test_as_an_option_it_keeps_the_regions(plan_of: PlanOf) -> None:
    blocks = (Region(start=0, stop=1), Region(start=1, stop=2))
    assert plan_of("per-block+offload", 2) == Plan(n_layers=2, regions=blocks, offload=True)
    assert plan_of("per-block+offload,skip_last", 2) == Plan(n_layers=2, regions=blocks[:1], offload=True)
    assert plan_of("every-k:2+offload", 4).block_calls_backward() == plan_of("every-k:2", 4).block_calls_backward()


@pytest.mark.parametrize("text", ["per-block+offload", "per-block,offload", "per-block,offload=true"])
def test_ways_to_write_the_option(text: str) -> None:
    assert specs.parse(text).label == "per-block+offload"


def test_none_with_offload_has_a_name_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"none with offload is the strategy offload"):
        specs.parse("none+offload")


def test_where_the_library_decides_it_is_refused() -> None:
    with pytest.raises(PlanError, match=r"offload cannot be added"):
        specs.resolve(specs.parse("hf-native+offload"), StackShape(n_layers=2, has_native=True))

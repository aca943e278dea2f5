"""reversible: one region that inverts, over the whole stack; for stacks that can, and with options that act."""

import pytest

from ckbench import specs
from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, StackShape
from ckbench.strategies.reversible import TOLERANCES


def plan_of(spec: str, n_layers: int, *, is_invertible: bool = True, precision: str = "fp32") -> Plan:
    shape = StackShape(n_layers=n_layers, is_invertible=is_invertible, precision=precision)
    return specs.resolve(specs.parse(spec), shape)


def test_plan_by_hand() -> None:
    plan = plan_of("reversible", 4)
    assert plan == Plan(n_layers=4, regions=(Region(start=0, stop=4, mode="invert"),))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_the_tolerance_is_that_of_the_arithmetic(precision: str) -> None:
    """Rebuilt inputs are rounded otherwise, so gradients are not bit-identical; shorter numbers differ by more."""
    plan = plan_of("reversible", 4, precision=precision)
    assert plan.tolerance == TOLERANCES[precision] > 0
    assert TOLERANCES["fp32"] < TOLERANCES["tf32"] == TOLERANCES["fp16"] < TOLERANCES["bf16"] < 0.5


@pytest.mark.parametrize("precision", ["bf16-pure", "fp16-pure"])
def test_streams_in_a_short_type_are_refused(precision: str) -> None:
    with pytest.raises(PlanError) as told:
        plan_of("reversible", 4, precision=precision)
    assert str(told.value) == (
        f"reversible needs streams in fp32: with {precision} every block rounds them, and what is rebuilt is further "
        f"off with each; write train.precision: {precision.removesuffix('-pure')}"
    )


@pytest.mark.parametrize("n_layers", [1, 2, 7, 48])
def test_every_block_runs_once_more_in_one_region(n_layers: int) -> None:
    plan = plan_of("reversible", n_layers)
    assert plan.block_calls_backward() == (1,) * n_layers
    assert plan.n_regions == plan.region_calls_backward() == 1


def test_it_is_no_alias_of_full() -> None:
    assert plan_of("reversible", 4) != plan_of("full", 4)


def test_an_ordinary_stack_is_refused() -> None:
    with pytest.raises(PlanError) as told:
        plan_of("reversible", 4, is_invertible=False)
    assert str(told.value) == "reversible needs model.residual: reversible; these blocks cannot rebuild their inputs"


@pytest.mark.parametrize("option", ["skip_last", "early_stop=false", "reentrant", "offload"])
def test_options_without_effect_are_refused(option: str) -> None:
    with pytest.raises(PlanError) as told:
        plan_of(f"reversible,{option}", 4)
    assert str(told.value) == (
        "reversible keeps the stack's output alone and rebuilds every input from it, "
        f"so {option.partition('=')[0]} has nothing to act on; leave it out"
    )


def test_the_random_state_is_an_option() -> None:
    assert plan_of("reversible,preserve_rng=false", 4) != plan_of("reversible", 4)

"""hf-native: the library's own checkpointing; one recomputation per block, and no region of ours."""

import pytest

from ckbench import specs
from ckbench.errors import PlanError
from ckbench.plan import Plan, StackShape


def resolve(spec: str, *, has_native: bool) -> Plan:
    return specs.resolve(specs.parse(spec), StackShape(n_layers=4, has_native=has_native))


def test_plan_by_hand() -> None:
    plan = resolve("hf-native", has_native=True)
    assert plan == Plan(n_layers=4, native=True)
    assert plan.is_active and plan.n_regions == 0
    assert plan.block_calls_backward() == (1, 1, 1, 1)


def test_underscores_are_hyphens() -> None:
    assert resolve("hf_native", has_native=True) == resolve("hf-native", has_native=True)


def test_a_model_without_a_library_has_none() -> None:
    with pytest.raises(PlanError) as told:
        resolve("hf-native", has_native=False)
    assert str(told.value) == (
        "hf-native is the transformers library's own checkpointing, and this model has none; write per-block"
    )


def test_it_takes_no_argument_and_no_offload() -> None:
    with pytest.raises(PlanError, match="hf-native decides inside the library"):
        resolve("hf-native+offload", has_native=True)


@pytest.mark.parametrize("option", ["skip_last", "early_stop=false", "preserve_rng=false", "reentrant"])
def test_options_of_regions_have_nothing_to_act_on(option: str) -> None:
    with pytest.raises(PlanError, match="hf-native has no region of ours"):
        resolve(f"hf-native,{option}", has_native=True)

"""selective:POLICY: one region per block that keeps the results of named operations."""

from collections.abc import Callable

import pytest

from ckbench import specs
from ckbench.errors import ConfigError, PlanError
from ckbench.plan import Plan, Region
from ckbench.strategies.selective import ATTENTION, MATMUL, read_policy

PlanOf = Callable[[str, int], Plan]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    ops = ("aten.addmm", "aten.mm")
    plan = plan_of("selective:aten.mm+aten.addmm", 2)
    assert plan == Plan(
        n_layers=2, regions=(Region(start=0, stop=1, save_ops=ops), Region(start=1, stop=2, save_ops=ops))
    )
    assert plan.block_calls_backward() == (1, 1)


@pytest.mark.parametrize(
    ("policy", "ops", "every"),
    [
        ("matmul", MATMUL, 1),
        ("attention", ATTENTION, 1),
        ("matmul+attention", MATMUL + ATTENTION, 1),
        ("attention+matmul", MATMUL + ATTENTION, 1),
        ("matmul+aten.native_dropout", (*MATMUL, "aten.native_dropout"), 1),
        ("every-2nd-matmul", MATMUL, 2),
        ("aten.mm.default", ("aten.mm.default",), 1),
        ("aten.mm@2", ("aten.mm@2",), 1),
        ("aten.mm@2+aten.mm.default@1+aten.gelu", ("aten.mm@2", "aten.mm.default@1", "aten.gelu"), 1),
        ("attention+aten.addmm@3", (*ATTENTION, "aten.addmm@3"), 1),
    ],
)
def test_policies(policy: str, ops: tuple[str, ...], every: int) -> None:
    assert read_policy(policy) == (tuple(sorted(ops)), every)


def test_a_list_in_yaml_is_the_same(plan_of: PlanOf) -> None:
    listed = specs.parse({"name": "selective", "policy": ["aten.mm", "aten.addmm"]})
    assert listed == specs.parse("selective:aten.mm+aten.addmm")
    assert plan_of(listed.label, 3) == plan_of("selective:aten.addmm+aten.mm", 3), "their order says nothing"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("matmull", "unknown policy 'matmull'; did you mean 'matmul'? (or name operations, as in aten.mm+aten.addmm@2)"),
        ("mm", "unknown policy 'mm'; have: matmul, attention, every-2nd-matmul (or name operations, as in aten.mm+aten.addmm@2)"),
        ("matmul+atention", "unknown policy 'atention'; did you mean 'attention'? (or name operations, as in aten.mm+aten.addmm@2)"),
        ("aten.mm@0", "unknown policy 'aten.mm@0'; have: matmul, attention, every-2nd-matmul (or name operations, as in aten.mm+aten.addmm@2)"),
        ("matmul@2", "unknown policy 'matmul@2'; did you mean 'matmul'? (or name operations, as in aten.mm+aten.addmm@2)"),
        ("every-2nd-matmul+aten.mm@1", "every-2nd-matmul stands alone: it counts every result that is kept, so nothing can be added to it"),
        ("every-2nd-matmul+attention", "every-2nd-matmul stands alone: it counts every result that is kept, so nothing can be added to it"),
    ],
)  # fmt: skip
def test_what_is_no_policy_is_told(plan_of: PlanOf, policy: str, said: str) -> None:
    with pytest.raises(PlanError) as told:
        plan_of(f"selective:{policy}", 2)
    assert str(told.value) == said


@pytest.mark.parametrize("written", ["selective:aten.mm@2+aten.addmm@1", "selective:aten.mm@2+aten.addmm@1#2"])
def test_single_calls_are_written_and_read_alike(written: str) -> None:
    """The mark of a call is another than the mark of a repeat."""
    spec = specs.parse(written)
    assert spec.label == written and specs.parse(spec.label) == spec
    assert spec.params == {"policy": "aten.mm@2+aten.addmm@1"}
    assert spec == specs.parse({"name": "selective", "policy": ["aten.mm@2", "aten.addmm@1"]}).model_copy(
        update={"repeat": spec.repeat}
    )


def test_single_calls_need_a_region_where_they_can_be_counted() -> None:
    with pytest.raises(PlanError, match="^single calls are kept in a region inside one block, where they can be"):
        Region(start=0, stop=2, save_ops=("aten.mm@2",))
    with pytest.raises(PlanError, match="^save_every counts results, and single calls are counted already; drop one$"):
        Region(start=0, stop=1, save_ops=("aten.mm", "aten.addmm@1"), save_every=2)
    with pytest.raises(PlanError, match="^operation 'aten.mm@x': after @ comes the number of the call, from 1, as in"):
        Region(start=0, stop=1, save_ops=("aten.mm@x",))
    inside = Region(start=0, stop=1, save_ops=("aten.mm@2",))
    assert Region(start=0, stop=4, children=(inside,)).children == (inside,)
    assert Region(start=0, stop=1, part="ffn", save_ops=("aten.mm@2",)).save_ops == ("aten.mm@2",)


def test_a_policy_is_needed() -> None:
    with pytest.raises(ConfigError, match="^strategy selective needs policy; write selective:POLICY$"):
        specs.parse("selective")


def test_reentrant_is_refused(plan_of: PlanOf) -> None:
    with pytest.raises(PlanError, match="^reentrant checkpoints keep nothing inside"):
        plan_of("selective:matmul,reentrant", 2)


def test_skip_last_drops_the_last_block(plan_of: PlanOf) -> None:
    assert plan_of("selective:matmul,skip_last", 3).regions == plan_of("selective:matmul", 3).regions[:2]

"""Plans as data: what regions may be, what every strategy's plan keeps to, and what a plan predicts."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from ckbench import registry, specs
from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, StackShape, check_apart, item_starts, near_equal, plan_from_json

NAMES = registry.names("strategies")
MAX_LAYERS = 40
WORDS: dict[str, list[str]] = {"selective": ["matmul", "attention", "matmul+attention", "every-2nd-matmul", "aten.mm"]}
"""Arguments of strategies that take a word."""


@st.composite
def strategy_plans(draw: st.DrawFn) -> tuple[str, dict[str, Any], Plan]:
    """Any strategy with any parameters, on a stack of any depth, with any options that make sense."""
    name = draw(st.sampled_from(NAMES))
    n_layers = draw(st.integers(1, MAX_LAYERS))
    cls = registry.load("strategies", name)
    drawn = {
        int: st.integers(1, MAX_LAYERS + 5),
        float: st.floats(0.0, 1.0),
        str: st.sampled_from(WORDS.get(name, [""])),
    }
    params = {field.name: draw(drawn[field.type]) for field in fields(cls)}
    stack = StackShape(
        n_layers=n_layers,
        block_saved_bytes=tuple(draw(st.lists(st.integers(0, 9), min_size=n_layers, max_size=n_layers))),
        is_invertible=True,
        has_native=True,
    )
    try:
        plan: Plan = cls(**params).plan(stack)
    except PlanError:  # checkpoint_sequential wants no more segments than blocks
        reject()
    if draw(st.booleans()):
        plan = plan.without_last_leaf()
    return name, params, replace(plan, early_stop=draw(st.booleans()))


def levels(plan: Plan) -> list[list[Region]]:
    """List the regions by nesting depth."""
    found, level = [], list(plan.regions)
    while level:
        found.append(level)
        level = [child for region in level for child in region.children]
    return found


def depth_of_blocks(plan: Plan) -> list[int]:
    """Count the regions around each block."""
    around = [0] * plan.n_layers
    for region in plan.walk():
        if region.part == "block":
            for block in range(region.start, region.stop):
                around[block] += 1
    return around


def rebuilt(data: dict[str, Any]) -> Plan:
    """Make a plan from what ``to_json`` gave, after a trip through JSON text."""
    return plan_from_json(json.loads(json.dumps(data)))


@given(strategy_plans())
def test_blocks_are_covered_at_most_once_per_level(case: tuple[str, dict[str, Any], Plan]) -> None:
    _, _, plan = case
    for level in levels(plan):
        covered = [(block, region.part) for region in level for block in range(region.start, region.stop)]
        assert len(covered) == len(set(covered))
        assert all(0 <= block < plan.n_layers for block, _ in covered)


@given(strategy_plans())
def test_leaves_are_disjoint_and_in_order(case: tuple[str, dict[str, Any], Plan]) -> None:
    _, _, plan = case
    leaves = [region for region in plan.walk() if not region.children]
    for before, after in zip(leaves, leaves[1:], strict=False):
        assert before.stop <= after.start


@given(strategy_plans())
def test_children_lie_inside_their_parent(case: tuple[str, dict[str, Any], Plan]) -> None:
    _, _, plan = case
    for region in plan.walk():
        for child in region.children:
            assert region.start <= child.start < child.stop <= region.stop
            assert child.n_blocks < region.n_blocks, "a child as large as its parent would be a checkpoint for nothing"


@given(strategy_plans())
def test_items_run_each_block_of_the_span_once(case: tuple[str, dict[str, Any], Plan]) -> None:
    _, _, plan = case
    for region in plan.walk():
        run: list[int] = []
        for item in region.items():
            run += range(item.start, item.stop) if isinstance(item, Region) else [item]
        assert run == list(range(region.start, region.stop))


@given(strategy_plans())
def test_round_trip_to_json(case: tuple[str, dict[str, Any], Plan]) -> None:
    _, _, plan = case
    again = rebuilt(plan.to_json())
    assert again == plan
    assert again.tolerance == plan.tolerance


@given(strategy_plans())
def test_without_early_stop_a_block_runs_once_per_region_around_it(case: tuple[str, dict[str, Any], Plan]) -> None:
    _, _, plan = case
    patient = replace(plan, early_stop=False)
    around = [depth + plan.native for depth in depth_of_blocks(plan)]  # a library's own checkpoints are no regions
    assert list(patient.block_calls_backward()) == around
    for early, late in zip(replace(plan, early_stop=True).block_calls_backward(), around, strict=True):
        assert min(late, 1) <= early <= late


@given(strategy_plans())
def test_without_early_stop_a_region_starts_once_per_level(case: tuple[str, dict[str, Any], Plan]) -> None:
    _, _, plan = case
    starts = sum((depth + 1) * len(level) for depth, level in enumerate(levels(plan)))
    assert replace(plan, early_stop=False).region_calls_backward() == starts
    assert replace(plan, early_stop=True).region_calls_backward() <= starts


@given(st.integers(1, 200), st.integers(1, 300))
def test_near_equal_is_balanced(n_layers: int, n_regions: int) -> None:
    spans = near_equal(n_layers, n_regions)
    lengths = [stop - start for start, stop in spans]
    assert len(spans) == min(n_layers, n_regions)
    assert spans[0][0] == 0 and spans[-1][1] == n_layers
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.integers(1, MAX_LAYERS), st.integers(1, MAX_LAYERS))
def test_segments_and_sqrt_are_balanced(n_layers: int, n: int) -> None:
    for spec in (f"segments:{n}", "sqrt"):
        lengths = [region.n_blocks for region in resolve(spec, n_layers).regions]
        assert sum(lengths) == n_layers
        assert max(lengths) - min(lengths) <= 1


def resolve(spec: str, n_layers: int) -> Plan:
    return specs.resolve(specs.parse(spec), StackShape(n_layers=n_layers))


def test_aliases_at_two_blocks() -> None:
    assert resolve("sqrt", 2) == resolve("every-k:4", 2) == resolve("full", 2) == resolve("segments:1", 2)
    assert resolve("nested:1", 2) == resolve("per-block", 2) == resolve("first-n:2", 2)
    assert resolve("sqrt", 2) != resolve("per-block", 2)
    assert resolve("nested:2", 2) == resolve("recursive", 2) != resolve("full", 2)


def test_options_make_another_plan() -> None:
    assert resolve("per-block", 4) != resolve("per-block,early_stop=false", 4)
    assert resolve("per-block", 4) != resolve("per-block,preserve_rng=false", 4)
    assert resolve("per-block", 4) != resolve("per-block,reentrant", 4)


def test_the_tolerance_is_not_part_of_the_decision() -> None:
    plan = resolve("per-block", 4)
    assert replace(plan, tolerance=1e-3) == plan


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"start": 2, "stop": 2}, "a region needs at least one block, got 2 to 2"),
        ({"start": -1, "stop": 2}, "a region needs at least one block, got -1 to 2"),
        ({"start": 0, "stop": 1, "part": "mlp"}, "a region covers one of block, ffn, attention, core, not 'mlp'"),
        ({"start": 0, "stop": 2, "part": "ffn"}, "a region over a part lies inside one block and has no children"),
        (
            {"start": 0, "stop": 2, "children": (Region(start=1, stop=3),)},
            "region 1 to 3 overlaps another or leaves 0 to 2",
        ),
        (
            {"start": 0, "stop": 3, "children": (Region(start=0, stop=2), Region(start=1, stop=3))},
            "region 1 to 3 overlaps another or leaves 0 to 3",
        ),
    ],
)
def test_impossible_regions_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError) as told:
        Region(**arguments)
    assert str(told.value) == text


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(PlanError) as told:
        Plan(n_layers=2, regions=(Region(start=0, stop=3),))
    assert str(told.value) == "region 0 to 3 overlaps another or leaves 0 to 2"
    with pytest.raises(PlanError) as told:
        Plan(n_layers=2, regions=(Region(start=0, stop=1), Region(start=1, stop=2, part="ffn")))
    assert str(told.value) == "a plan covers whole blocks or parts of blocks, not both"
    with pytest.raises(PlanError) as told:
        check_apart((Region(start=1, stop=2), Region(start=0, stop=1)), 0, 2)
    assert str(told.value) == "region 0 to 1 overlaps another or leaves 0 to 2"


def test_a_mixed_tree_by_hand() -> None:
    """A region of five blocks; blocks 0 and 4 run plainly, 1 and 2-3 are children."""
    children = (Region(start=1, stop=2), Region(start=2, stop=4))
    plan = Plan(n_layers=6, regions=(Region(start=0, stop=5, children=children),))
    assert plan.regions[0].items() == [0, children[0], children[1], 4]
    assert plan.block_calls_backward() == (1, 2, 2, 2, 1, 0)
    assert plan.region_calls_backward() == 1 + 2 + 2  # the replay ends in block 4, so no child is spared
    assert item_starts(plan.regions[0]) == plan.n_regions == 3
    assert plan.without_last_leaf().regions[0].children == (children[0],)

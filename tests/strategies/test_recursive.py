"""recursive: halves within halves; L(1 + log2(L)/2) block forwards in backward, L(1 + log2 L) without early stop."""

import math
from collections.abc import Callable

import pytest

from ckbench import specs
from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, StackShape

PlanOf = Callable[[str, int], Plan]
Leaves = Callable[[Plan], list[tuple[int, int]]]


def test_plan_by_hand(plan_of: PlanOf) -> None:
    left = Region(start=0, stop=2, children=(Region(start=0, stop=1), Region(start=1, stop=2)))
    right = Region(start=2, stop=4, children=(Region(start=2, stop=3), Region(start=3, stop=4)))
    assert plan_of("recursive", 4) == Plan(n_layers=4, regions=(Region(start=0, stop=4, children=(left, right)),))


def test_an_odd_span_gives_its_first_half_the_extra_block(plan_of: PlanOf) -> None:
    (root,) = plan_of("recursive", 5).regions
    assert [(child.start, child.stop) for child in root.children] == [(0, 3), (3, 5)]
    assert [(child.start, child.stop) for child in root.children[0].children] == [(0, 2), (2, 3)]


def test_one_block_is_one_region(plan_of: PlanOf) -> None:
    assert plan_of("recursive", 1) == plan_of("per-block", 1)


@pytest.mark.parametrize("n_layers", [1, 2, 3, 6, 7, 13])
def test_goes_down_to_single_blocks(plan_of: PlanOf, leaves: Leaves, n_layers: int) -> None:
    plan = plan_of("recursive", n_layers)
    assert leaves(plan) == [(i, i + 1) for i in range(n_layers)]
    assert plan.n_regions == 2 * n_layers - 1  # a full binary tree


@pytest.mark.parametrize("power", range(6))
def test_block_calls_for_powers_of_two(plan_of: PlanOf, power: int) -> None:
    L = 2**power
    assert sum(plan_of("recursive", L).block_calls_backward()) == L + L * power // 2
    assert plan_of("recursive,early_stop=false", L).block_calls_backward() == (1 + power,) * L


def test_block_calls_by_hand(plan_of: PlanOf) -> None:
    assert plan_of("recursive", 4).block_calls_backward() == (3, 2, 2, 1)
    assert plan_of("recursive", 3).block_calls_backward() == (3, 2, 1)


def test_region_starts_by_hand(plan_of: PlanOf) -> None:
    """Four blocks: the root (1) starts its left half and what is inside (3); each half (1) starts its first
    block (1); four blocks replay (4)."""
    assert plan_of("recursive", 4).region_calls_backward() == 1 + 3 + 2 * (1 + 1) + 4


def test_depth_grows_with_the_logarithm(plan_of: PlanOf) -> None:
    def depth(region: Region) -> int:
        return 1 + max((depth(child) for child in region.children), default=0)

    for n_layers in (1, 2, 5, 8, 33):
        (root,) = plan_of("recursive", n_layers).regions
        assert depth(root) == 1 + math.ceil(math.log2(n_layers))


def test_skip_last(plan_of: PlanOf) -> None:
    plan = plan_of("recursive,skip_last", 4)
    assert plan.block_calls_backward() == (3, 2, 2, 1)  # the last block runs plainly inside its parent's replay
    assert plan_of("recursive,skip_last", 1) == plan_of("none", 1)


def test_reentrant_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot be nested"):
        specs.resolve(specs.parse("recursive,reentrant"), StackShape(n_layers=4))

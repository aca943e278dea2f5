"""Few of each run stand for all: what is taken out of a plan is put back into its step, and what differs is refused."""

import random
from dataclasses import replace
from typing import Any

import pytest

from ckbench.estimate.repeats import KEPT as NUMBERS
from ckbench.estimate.repeats import NotAChain, Run, lengthen, shorten
from ckbench.estimate.spans import Span
from ckbench.plan import Plan, Region

KEPT = NUMBERS[0]
KINDS: tuple[dict[str, Any], ...] = ({}, {"save_ops": ("aten.mm",)}, {"save_ops": ("aten.mm",), "save_every": 2})


def per_block(n_layers: int, **more: Any) -> Plan:
    return Plan(n_layers=n_layers, regions=tuple(Region(start=i, stop=i + 1, **more) for i in range(n_layers)))


def span(mark: str, block: int | None, added_bytes: int, phase: str = "forward") -> Span:
    return Span(mark=mark, block=block, phase=phase, added_bytes=added_bytes, rise_bytes=max(0, added_bytes))


def step_of(plan: Plan) -> list[Span]:
    """Make up a step: a forward mark per block, then backward, where an outer region's blocks come forward again."""

    def inside(region: Region) -> list[Span]:
        again = [span(f"enter {i}", i, 5, "backward") for i in range(region.start, region.stop)]
        made: list[Span] = list(again)
        for item in reversed(region.items()):
            if isinstance(item, Region):
                made += inside(item)
            else:
                made.append(span(f"gradient {item}", item, -7, "backward"))
        return made

    spans = [span("forward", None, 100)]
    spans += [span(f"call {i}", i, 10) for i in range(plan.n_layers)]
    spans += [span("turn", None, 3, "loss")]
    whole = Region(start=0, stop=plan.n_layers, children=tuple(r for r in plan.regions if r.part == "block"))
    for item in reversed(whole.items()):
        spans += inside(item) if isinstance(item, Region) else [span(f"gradient {item}", item, -10, "backward")]
    return [*spans, span("end", None, 0, "")]


def shapes(spans: list[Span]) -> list[tuple[object, ...]]:
    """Give spans without the blocks' numbers, which a lengthened step repeats."""
    return [(s.mark.partition(" ")[0], s.phase, s.added_bytes, s.rise_bytes) for s in spans]


@pytest.mark.parametrize("n_layers", [1, KEPT, KEPT + 1, 9, 1000])
def test_a_plain_stack_keeps_four_blocks(n_layers: int) -> None:
    short = shorten(Plan(n_layers=n_layers))
    assert short.plan == Plan(n_layers=min(n_layers, KEPT))
    assert short.runs == ((Run(start=0, n_blocks=1, n_real=n_layers, n_kept=KEPT),) if n_layers > KEPT else ())


def test_what_a_plan_says_besides_its_regions_stays() -> None:
    plan = replace(per_block(20), early_stop=False, preserve_rng=False, offload=True)
    short = shorten(plan)
    assert replace(short.plan, n_layers=20, regions=plan.regions) == plan
    assert short.plan.regions == per_block(KEPT).regions


def test_every_pattern_is_shortened_by_itself() -> None:
    """Five recomputed, then 12 plain, then 7 segments of two: four, four and four of two."""
    regions = [Region(start=i, stop=i + 1) for i in range(5)]
    regions += [Region(start=i, stop=i + 2) for i in range(17, 31, 2)]
    short = shorten(Plan(n_layers=31, regions=tuple(regions)))
    assert short.plan.n_layers == 4 + 4 + 8
    assert [(r.start, r.stop) for r in short.plan.regions] == [
        (0, 1), (1, 2), (2, 3), (3, 4), (8, 10), (10, 12), (12, 14), (14, 16),
    ]  # fmt: skip
    assert short.runs == (
        Run(start=0, n_blocks=1, n_real=5, n_kept=KEPT),
        Run(start=4, n_blocks=1, n_real=12, n_kept=KEPT),
        Run(start=8, n_blocks=2, n_real=7, n_kept=KEPT),
    )


def test_a_pattern_of_several_items_is_one() -> None:
    """One in three, as one-in-k lays it: two plain blocks, one recomputed."""
    regions = tuple(Region(start=i, stop=i + 1) for i in range(2, 30, 3))
    short = shorten(Plan(n_layers=30, regions=regions))
    assert short.runs == (Run(start=0, n_blocks=3, n_real=10, n_kept=KEPT),)
    assert [r.start for r in short.plan.regions] == [2, 5, 8, 11]


def test_parts_belong_to_their_block() -> None:
    regions = tuple(Region(start=i, stop=i + 1, part=part) for i in range(9) for part in ("attention", "ffn"))
    short = shorten(Plan(n_layers=9, regions=regions))
    assert short.plan.n_layers == KEPT
    assert sorted((r.start, r.part) for r in short.plan.regions) == [
        (i, part) for i in range(KEPT) for part in ("attention", "ffn")
    ]


def test_regions_that_keep_other_operations_are_no_repeat() -> None:
    regions = tuple(Region(start=i, stop=i + 1, **KINDS[i % 3]) for i in range(6))
    plan = Plan(n_layers=6, regions=regions)
    assert shorten(plan).plan == plan, "two repeats of three are fewer than are kept"


def test_runs_inside_regions_come_before_the_run_of_their_regions() -> None:
    outer = tuple(
        Region(start=i, stop=i + 8, children=tuple(Region(start=j, stop=j + 1) for j in range(i, i + 8)))
        for i in range(0, 80, 8)
    )
    short = shorten(Plan(n_layers=80, regions=outer))
    assert short.plan.n_layers == 16
    assert short.runs == (
        *(Run(start=4 * i, n_blocks=1, n_real=8, n_kept=KEPT) for i in range(4)),
        Run(start=0, n_blocks=4, n_real=10, n_kept=KEPT),
    )


def drawn_region(draw: random.Random, start: int, stop: int, depth: int) -> Region:
    children: list[Region] = []
    if depth and stop - start > 1 and draw.random() < 0.5:
        at = start
        width = draw.randint(1, max(1, (stop - start) // 2))
        while at + width <= stop:
            if draw.random() < 0.8:
                children.append(drawn_region(draw, at, at + width, depth - 1))
            at += width
    return Region(start=start, stop=stop, children=tuple(children))


def drawn_plan(draw: random.Random, n_layers: int) -> Plan:
    """Draw runs of equal patterns, with plain blocks and nested regions among them."""
    regions: list[Region] = []
    at = 0
    while at < n_layers:
        width, times = draw.randint(1, 4), draw.choice((1, 2, 5, 6, 9))
        if draw.random() < 0.3:
            at += width
            continue
        pattern = drawn_region(draw, 0, width, 2)
        for _ in range(times):
            if at + width > n_layers:
                break
            regions.append(pattern.moved(at))
            at += width
        if at + width > n_layers:
            break
    return Plan(n_layers=n_layers, regions=tuple(regions))


@pytest.mark.parametrize("n_kept", NUMBERS)
@pytest.mark.parametrize("seed", range(60))
def test_a_short_step_lengthened_is_the_long_one(seed: int, n_kept: int) -> None:
    """On made-up steps whose spans depend on the plan alone."""
    draw = random.Random(seed)
    plan = drawn_plan(draw, draw.randint(8, 60))
    short = shorten(plan, n_kept)
    assert short.plan.n_layers <= plan.n_layers
    assert shapes(lengthen(step_of(short.plan), short.runs)) == shapes(step_of(plan))


def test_neighbours_that_differ_are_refused() -> None:
    short = shorten(Plan(n_layers=9))
    spans = step_of(short.plan)
    at = next(i for i, s in enumerate(spans) if s.mark == "call 2")
    spans[at] = replace(spans[at], added_bytes=11)
    with pytest.raises(NotAChain, match="^two equal blocks in a row differ: call 1 adds 10 bytes, call 2 adds 11$"):
        lengthen(spans, short.runs)
    longer = lengthen(spans, short.runs, checked=False)
    assert len(longer) == len(step_of(Plan(n_layers=9))), "unchecked, the first of the two stands for those between"


def test_the_first_and_the_last_of_a_run_may_differ() -> None:
    short = shorten(Plan(n_layers=9))
    spans = [replace(s, added_bytes=99) if s.mark in ("call 0", "gradient 3") else s for s in step_of(short.plan)]
    longer = lengthen(spans, short.runs)
    assert sum(s.added_bytes == 99 for s in longer) == 2 and len(longer) == 3 + 2 * 9

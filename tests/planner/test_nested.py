"""Nested regions of equal blocks against every nested plan of small stacks, each simulated event by event."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ckbench.plan import Region
from ckbench.planner.chain import Chain, Item
from ckbench.planner.nested import EqualBlock, Way, nested_items, regions_by_length
from ckbench.planner.solve import front
from tests.planner.stack_simulator import Plan, Span, Stack, chain_of, pareto, random_block, random_stack, simulate


def equal_stack(rng: random.Random, n_blocks: int, n_ways: int) -> Stack:
    """Draw a stack of equal blocks behind an embedding of the same width."""
    stack = random_stack(rng, n_blocks, n_ways)
    block = random_block(rng, n_ways, ties=rng.random() < 0.3)
    return replace(stack, first=block.out, blocks=(block,) * n_blocks)


def equal_block(stack: Stack) -> tuple[Chain, EqualBlock]:
    """Read the figures of a block off single runs: each way, and a region of its own around it."""
    block = stack.blocks[0]
    chain, entries = chain_of(stack, {i: [Span(1, (0,))] for i in range(len(stack.blocks))})
    ways = []
    for item in chain.items[1]:
        entry = entries[id(item)]
        figures = {
            "kept_bytes": item.kept_bytes,
            "forward_peak_bytes": item.forward_peak_bytes,
            "backward_peak_bytes": item.backward_peak_bytes,
            "extra_s": item.extra_s,
        }
        if isinstance(entry, Span):
            ways.append(Way(region=Region(start=0, stop=1), **figures))
            continue
        way = block.ways[entry]
        last = max(way.forward_work, way.saved)
        let_go = 0 if way.keeps_input else block.out
        ways.append(Way(region=None, last_forward_peak_bytes=last, input_let_go_bytes=let_go, **figures))
    given = EqualBlock(
        output_bytes=block.out,
        plain_peak_bytes=max(block.work, block.out),
        gradient_bytes=chain.later_bytes[1] - chain.later_bytes[2],
        forward_s=block.forward_s,
        tail_s=block.tail_s,
        ways=tuple(ways),
    )
    return chain, given


def every_plan(n: int, n_ways: int, depth: int) -> Iterator[Plan]:
    """Give all plans of ``n`` blocks: ways, regions of one block, and regions of more inside one another."""
    if n == 0:
        yield ()
        return
    for rest in every_plan(n - 1, n_ways, depth):
        yield from ((way, *rest) for way in range(n_ways))
        yield (Span(1, (0,)), *rest)
    for size in range(2, n + 1 if depth else 0):
        for rest in every_plan(n - size, n_ways, depth):
            for inside in every_plan(size, n_ways, depth - 1):
                yield (Span(size, inside), *rest)


def add_nested(chain: Chain, block: EqualBlock, max_depth: int) -> Chain:
    """Add the nested regions of every span to a chain."""
    n, items = chain.n_blocks, []
    for i, row in enumerate(chain.items):
        more = [nested_items(block, i, size, max_depth=max_depth, max_points=10**6) for size in range(2, n - i + 1)]
        items.append((*row, *(item for found in more for item in found)))
    return replace(chain, items=tuple(items))


def as_plan(items: tuple[Item, ...], chain: Chain, n_ways: int) -> Plan:
    """Translate chosen items into a plan to simulate: regions by their trees, ways by their place in the chain."""

    def entry(region: Region) -> Span:
        if region.n_blocks == 1:
            return Span(1, (0,))
        return Span(region.n_blocks, tuple(entry(x) if isinstance(x, Region) else 0 for x in region.items()))

    plan = []
    for item in items:
        k = next((k for k, own in enumerate(chain.items[item.start]) if own is item), n_ways)
        assert k < n_ways or item.region is not None
        plan.append(k if k < n_ways else entry(item.region))
    return tuple(plan)


@pytest.mark.parametrize(("n", "n_ways", "depth"), [(2, 2, 2), (3, 2, 2), (4, 1, 3), (4, 2, 1), (5, 1, 2), (6, 1, 1)])
def test_the_front_is_that_of_every_nested_plan(n: int, n_ways: int, depth: int) -> None:
    rng = random.Random(1000 * n + 10 * n_ways + depth)
    plans = list(every_plan(n, n_ways, depth))
    for _ in range(max(4, 3000 // len(plans))):
        stack = equal_stack(rng, n, n_ways)
        chain, block = equal_block(stack)
        chain = add_nested(chain, block, depth)
        best = pareto([simulate(stack, plan)[:2] for plan in plans])
        assert [(s.peak_bytes, round(s.extra_s or 0, 6)) for s in front(chain)] == best


@pytest.mark.parametrize(("n", "n_ways", "depth"), [(2, 3, 1), (3, 2, 2), (4, 1, 3), (4, 2, 1), (5, 1, 2)])
def test_regions_trade_peak_for_time_as_the_best_of_all_replays(n: int, n_ways: int, depth: int) -> None:
    rng = random.Random(n + 10 * n_ways + 100 * depth)
    inner = list(every_plan(n, n_ways, depth - 1))
    for _ in range(max(6, 3000 // len(inner))):
        stack = equal_stack(rng, n, n_ways)
        chain, block = equal_block(stack)
        points = []
        for inside in inner:
            _, seconds, (seen,), _ = simulate(stack, (Span(n, inside),))
            points.append((seen.top_backward - seen.before - chain.later_bytes[n], seconds))
        found = nested_items(block, 0, n, max_depth=depth, max_points=10**6)
        assert [(item.backward_peak_bytes, round(item.extra_s, 6)) for item in found] == pareto(points)
        for item in found:
            assert item.forward_peak_bytes == seen.top_forward - seen.before
            assert item.kept_bytes == seen.after - seen.before


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_region_peaks_and_lasts_as_simulated(depth: int) -> None:
    rng = random.Random(depth)
    for _ in range(12):
        stack = equal_stack(rng, 7, 1)
        chain, block = equal_block(stack)
        nested = add_nested(chain, block, depth)
        for solution in front(nested):
            assert solution.items is not None
            peak, seconds, *_ = simulate(stack, as_plan(solution.items, chain, 1))
            assert (solution.peak_bytes, round(solution.extra_s or 0, 6)) == (peak, seconds)


def test_deeper_never_costs_more_and_sometimes_less() -> None:
    rng = random.Random(5)
    lower = 0
    for _ in range(20):
        _, block = equal_block(equal_stack(rng, 9, 1))
        flat, deep = (regions_by_length(block, 9, max_depth=d, max_points=10**6)[9] for d in (1, 3))
        for item in flat:
            assert any(o.backward_peak_bytes <= item.backward_peak_bytes and o.extra_s <= item.extra_s for o in deep)
        lower += deep[0].backward_peak_bytes < flat[0].backward_peak_bytes
    assert lower > 0


def test_thinning_keeps_the_ends_and_only_true_points() -> None:
    rng = random.Random(3)
    block = equal_block(equal_stack(rng, 3, 3))[1]
    while len(regions_by_length(block, 8, max_depth=1, max_points=10**6)[8]) < 12:
        block = equal_block(equal_stack(rng, 3, 3))[1]
    whole = nested_items(block, 0, 8, max_depth=1, max_points=10**6)
    thin = nested_items(block, 0, 8, max_depth=1, max_points=6)
    assert 2 <= len(thin) <= 6
    assert thin[-1].extra_s == whole[-1].extra_s
    for item in thin:
        assert any(o.backward_peak_bytes <= item.backward_peak_bytes and o.extra_s <= item.extra_s for o in whole)


def test_a_single_block_is_no_span() -> None:
    block = equal_block(equal_stack(random.Random(0), 3, 1))[1]
    with pytest.raises(ValueError, match="two blocks or more"):
        nested_items(block, 0, 1)

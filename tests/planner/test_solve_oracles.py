"""The solver against answers that come from elsewhere: HiGHS, Revolve and its binomials, closed forms."""

import math
import random
from itertools import pairwise

import pytest
from checkpoint_schedules import EndReverse, Forward, Revolve

from ckbench.plan import Region
from ckbench.planner.chain import Chain, Item, extra_s
from ckbench.planner.nested import EqualBlock, Way, regions_by_length
from ckbench.planner.solve import floor, solve
from tests.planner.chains import gpt_chain, made_item, random_chain


@pytest.mark.parametrize("spans", [False, True])
def test_highs_finds_the_same(spans: bool) -> None:
    rng = random.Random(99 + spans)
    for k in range(160):
        whole = k % 2 == 0
        n, n_items = rng.randint(1, 12), rng.randint(1, 5)
        chain = random_chain(rng, n, n_items, spans=spans, whole=whole, releases=k % 3 == 0)
        budget = floor(chain).peak_bytes + rng.randint(-1, 60)
        ours, theirs = (solve(chain, budget, method=method) for method in ("labels", "highs"))
        assert ours.proven_optimal and theirs.proven_optimal
        assert (ours.items is None) == (theirs.items is None) == (budget < ours.floor_bytes)
        if theirs.items is not None:
            assert theirs.extra_s == pytest.approx(ours.extra_s, abs=1e-8)
            assert chain.peak_bytes(theirs.items) == theirs.peak_bytes <= budget


@pytest.mark.parametrize("seed", [None, 1])
def test_highs_finds_the_same_in_a_real_stack_of_bytes(seed: int | None) -> None:
    chain = gpt_chain(24, 6, seed=seed, spans=True)
    least = floor(chain).peak_bytes
    for share in (0.0, 0.1, 0.5):
        budget = least + int(share * (chain.peak_bytes([row[0] for row in chain.items]) - least))
        ours, theirs = (solve(chain, budget, method=method) for method in ("labels", "highs"))
        assert ours.proven_optimal and theirs.proven_optimal
        assert theirs.extra_s == pytest.approx(ours.extra_s, rel=1e-9)
        assert theirs.peak_bytes is not None and theirs.peak_bytes <= budget


UNIT = EqualBlock(
    output_bytes=1,
    plain_peak_bytes=0,
    gradient_bytes=0,
    forward_s=1.0,
    tail_s=0.0,
    ways=(
        Way(region=None, kept_bytes=10**6, forward_peak_bytes=0, backward_peak_bytes=10**7, extra_s=0.0),
        Way(
            region=Region(start=0, stop=1),
            kept_bytes=1,
            forward_peak_bytes=0,
            backward_peak_bytes=10**7,
            extra_s=1.0,
        ),
    ),
)
"""Revolve's world: a state takes one slot, what a plain block holds is free while it is the last, never before."""


def unit_chain(n: int) -> Chain:
    """Give ``n`` unit steps with nested regions of any depth; a budget of 10**7 + s leaves s slots."""
    nested = regions_by_length(UNIT, n, max_depth=n, max_points=10**6) if n > 1 else {}
    items = []
    for i in range(n):
        row = [made_item(i, i + 1, 10**6, 0, 10**7, 0.0), made_item(i, i + 1, 1, 0, 10**7, 1.0)]
        for size in range(2, n - i + 1):
            row += [
                made_item(i, i + size, o.kept_bytes, o.forward_peak_bytes, o.backward_peak_bytes, o.extra_s)
                for o in nested[size]
            ]
        items.append(tuple(row))
    return Chain(
        n_blocks=n,
        items=tuple(items),
        start_bytes=0,
        head_peak_bytes=0,
        later_bytes=(0,) * (n + 1),
        fixed_peak_bytes=0,
        plain_s=float(n),
    )


def revolve_steps(n: int, slots: int) -> int:
    """Count the forward steps of checkpoint-schedules' Revolve."""
    steps = 0
    for action in Revolve(n, slots):
        if isinstance(action, EndReverse):
            break
        steps += action.n1 - action.n0 if isinstance(action, Forward) else 0
    return steps


def binomial_steps(n: int, slots: int) -> int:
    """Give the least number of forward steps, first sweep included: r n - C(s + r, s + 1) + n (Griewank 1992), with
    the smallest r for which C(s + r, s) >= n."""
    r = next(r for r in range(n + 1) if math.comb(slots + r, slots) >= n)
    return r * n - math.comb(slots + r, slots + 1) + n


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12, 17])
def test_unit_costs_take_as_many_steps_as_revolve(n: int) -> None:
    chain = unit_chain(n)
    for slots in range(1, min(n, 6) + 1):
        found = solve(chain, 10**7 + slots)
        assert found.proven_optimal and found.extra_s is not None
        steps = n + round(found.extra_s)
        assert steps == binomial_steps(n, slots)
        if n > 1 and slots < n:
            assert steps == revolve_steps(n, slots)


@pytest.mark.parametrize(("n", "slots"), [(12, 3), (48, 4), (96, 6), (200, 8)])
def test_revolve_itself_counts_as_the_binomials_do(n: int, slots: int) -> None:
    assert revolve_steps(n, slots) == binomial_steps(n, slots)


def equal_chain(n: int, x: int, g: int, pb: int, head: int, g_head: int, options: list[tuple[int, float]]) -> Chain:
    """Give equal blocks as the closed forms have them: output x, gradients g, options of (saved, extra seconds)."""
    items = tuple(tuple(made_item(i, i + 1, s + x, s + x, pb, r) for s, r in options) for i in range(n))
    later = tuple(g_head + (n - i) * g for i in range(n + 1))
    return Chain(
        n_blocks=n,
        items=items,
        start_bytes=1000 + x,
        head_peak_bytes=head,
        later_bytes=later,
        fixed_peak_bytes=0,
        plain_s=1.0,
    )


def test_formula_1_the_peak_of_any_plan_in_ascending_order_is_at_an_end() -> None:
    rng = random.Random(0)
    for _ in range(200):
        n, x, g, pb = rng.randint(2, 30), rng.randint(1, 20), rng.randint(0, 60), rng.randint(220, 300)
        head, g_head = rng.randint(30, 900), rng.randint(0, 100)
        options = [(rng.randint(0, 180), float(rng.randint(0, 9))) for _ in range(3)]
        chain = equal_chain(n, x, g, pb, head, g_head, options)

        def formula(saved: list[int], x: int = x, g: int = g, top: int = pb + g_head, head: int = head) -> int:
            n, last = len(saved), max(saved)
            first_backward = x + top + (n - 1) * g
            return 1000 + max(first_backward, n * x + sum(saved) - last + top, (n + 1) * x + sum(saved) + head)

        picked = sorted((rng.choice(chain.items[i]) for i in range(n)), key=lambda item: item.kept_bytes)
        plan = [chain.items[i][chain.items[item.start].index(item)] for i, item in enumerate(picked)]
        assert chain.peak_bytes(plan) == formula([item.kept_bytes - x for item in plan])
        assert floor(chain).peak_bytes == formula([min(s for s, _ in options)] * n)
        budget = rng.randint(floor(chain).peak_bytes, chain.peak_bytes(plan) + 50)
        found = solve(chain, budget)
        assert found.items is not None
        assert formula([item.kept_bytes - x for item in found.items]) <= budget


def test_formula_2_two_neighbours_on_the_hull_come_within_one_step_of_the_best() -> None:
    rng = random.Random(1)
    met = 0
    for _ in range(150):
        n, x, g_head = rng.randint(2, 40), rng.randint(1, 20), rng.randint(0, 60)
        hull = [(180, 0.0)]
        for price in sorted(rng.sample(range(1, 60), 4)):
            step = rng.randint(5, 45)
            hull.append((max(0, hull[-1][0] - step), hull[-1][1] + price * min(step, hull[-1][0])))
        hull = [hull[0], *(b for a, b in pairwise(hull) if b[0] < a[0])]
        pb, head = 220, 400 + g_head
        chain = equal_chain(n, x, 0, pb, head, g_head, hull)
        room = rng.randint(n * hull[-1][0], n * hull[0][0])
        found = solve(chain, 1000 + (n + 1) * x + head + room)
        assert found.extra_s is not None
        if room == n * hull[0][0]:
            assert found.extra_s == 0
            continue
        (s0, r0), (s1, r1) = next((a, b) for a, b in pairwise(hull) if n * b[0] <= room < n * a[0])
        n_high = (room - n * s1) // (s0 - s1)
        closed = n_high * r0 + (n - n_high) * r1
        assert found.extra_s <= closed < found.extra_s + (r1 - r0)
        met += found.extra_s == closed
    assert met > 30


@pytest.mark.parametrize("is_full_inside", [False, True])
def test_formulas_3_and_4_uniform_segments(is_full_inside: bool) -> None:
    """Segments of k, saved inside (3) or recomputed one by one inside (4), come out of the nested search alone."""
    rng = random.Random(2)
    for _ in range(60):
        k, n_segments = rng.randint(2, 6), rng.randint(1, 8)
        n, x, s = k * n_segments, rng.randint(1, 20), rng.randint(30, 90)
        g, g_head, pb = rng.randint(0, x), rng.randint(0, 100), rng.randint(220, 300)
        forward_s, tail_s = 5.0, 1.0
        way = Way(
            region=Region(start=0, stop=1) if is_full_inside else None,
            kept_bytes=x if is_full_inside else s + x,
            forward_peak_bytes=s + x,
            backward_peak_bytes=pb,
            extra_s=forward_s - tail_s if is_full_inside else 0.0,
        )
        block = EqualBlock(
            output_bytes=x, plain_peak_bytes=x, gradient_bytes=g, forward_s=forward_s, tail_s=tail_s, ways=(way,)
        )
        (segment,) = regions_by_length(block, k, max_depth=1)[k]
        plan: list[Item] = [
            made_item(i, i + k, x, segment.forward_peak_bytes, segment.backward_peak_bytes, segment.extra_s)
            for i in range(0, n, k)
        ]
        chain = equal_chain(n, x, g, pb, 0, g_head, [(s, 0.0)])
        inside = (k - 1) * (x if is_full_inside else s + x)
        assert chain.peak_bytes(plan) == 1000 + g_head + pb + max(n_segments * x + inside, x + inside + (n - k) * g)
        closed = n * forward_s - n_segments * tail_s
        if is_full_inside:
            closed = (n - n_segments) * forward_s + n * (forward_s - tail_s)
        assert extra_s(plan) == pytest.approx(closed)

"""Every answer of the solver against all plans of small stacks, judged by a simulation of each step."""

import random
from dataclasses import replace

import pytest

from ckbench.planner.chain import Chain, extra_s
from ckbench.planner.solve import floor, front, solve
from tests.planner.stack_simulator import Span, Stack, chain_of, pareto, plans, random_stack, simulate

SHAPES = [(1, 4), (2, 4), (3, 3), (4, 3), (5, 3), (6, 2), (7, 2), (8, 2), (10, 2)]


def small_case(rng: random.Random) -> tuple[Chain, list[tuple[int, float]]]:
    """Draw a stack; give its chain and (peak, extra seconds) of every plan as the simulator sees them."""
    n, n_ways = rng.choice(SHAPES)
    return judge(rng, random_stack(rng, n, n_ways, has_copies=rng.random() < 0.4))


def judge(rng: random.Random, stack: Stack) -> tuple[Chain, list[tuple[int, float]]]:
    """Give a stack's chain, with segments in some, and what the simulator sees of every plan."""
    n = len(stack.blocks)
    spans: dict[int, list[Span]] = {}
    if n <= 6 and rng.random() < 0.6:
        sizes = [k for k in (2, 3) if k <= n]
        spans = {i: [Span(k, (0,) * k) for k in sizes if i + k <= n] for i in range(n)}
    chain, entries = chain_of(stack, spans)
    judged = []
    for items in plans(chain):
        peak, seconds, *_ = simulate(stack, tuple(entries[id(item)] for item in items))
        assert (peak, seconds) == (chain.peak_bytes(items), extra_s(items))
        judged.append((peak, seconds))
    return chain, judged


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_is_better_at_any_budget(seed: int) -> None:
    rng = random.Random(seed)
    n_budgets = two_sums = 0
    while n_budgets < 300:
        chain, judged = small_case(rng)
        best = pareto(judged)
        assert [(s.peak_bytes, s.extra_s) for s in front(chain)] == best
        least = best[0][0]
        assert floor(chain).peak_bytes == least
        budgets = {peak + d for peak, _ in best for d in (-1, 0)} | {rng.randint(least - 5, best[-1][0] + 5)}
        for budget in sorted(budgets):
            found = solve(chain, budget)
            assert found.floor_bytes == least and found.proven_optimal and found.gap == 0.0
            fits = [pair for pair in best if pair[0] <= budget]
            assert (found.peak_bytes, found.extra_s) == (fits[-1] if fits else (None, None))
            if found.items is None:
                assert budget < least
            else:
                assert (chain.peak_bytes(found.items), extra_s(found.items)) == fits[-1]
            n_budgets += 1
        two_sums += any(item.released_bytes for row in chain.items for item in row)
    assert two_sums > 0


def test_a_stack_and_its_mirror_image_have_best_plans_that_differ() -> None:
    rng = random.Random(7)
    differ = 0
    for _ in range(25):
        n, n_ways = rng.choice([(4, 3), (5, 3), (6, 2)])
        stack = random_stack(rng, n, n_ways)
        mirrored = replace(stack, blocks=stack.blocks[::-1])
        chains = [chain_of(s)[0] for s in (stack, mirrored)]
        judged = [pareto(judge(random.Random(0), s)[1]) for s in (stack, mirrored)]
        budget = max(j[0][0] for j in judged) + rng.randint(0, 30)
        found = []
        for chain, best in zip(chains, judged, strict=True):
            found.append(solve(chain, budget))
            assert found[-1].extra_s is not None
            assert found[-1].extra_s <= min(seconds for peak, seconds in best if peak <= budget)
        assert found[0].items is not None
        # The image of the first plan, in the mirrored stack: over the budget, or not the best.
        ways = [chains[0].items[item.start].index(item) for item in found[0].items]
        image = [chains[1].items[i][way] for i, way in enumerate(reversed(ways))]
        differ += chains[1].peak_bytes(image) > budget or extra_s(image) > (found[1].extra_s or 0.0)
    assert differ > 0

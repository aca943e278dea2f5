"""What holds for every chain and budget, and what the solver says when it cannot find out."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckbench.planner import solve as solving
from ckbench.planner.chain import Chain, extra_s
from ckbench.planner.solve import Solution, floor, front, owner, solve
from ckbench.planner.solve_bound import Limits
from ckbench.planner.solve_highs import may_sort, silent_stdout
from ckbench.planner.solve_labels import unbeaten
from ckbench.planner.solve_table import Table
from tests.planner.chains import gpt_chain, made_item, random_chain


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Draw a chain of up to 12 blocks with up to 4 items each, segments in some."""
    n, n_items = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    seed, spans = draw(st.integers(0, 10**6)), draw(st.booleans())
    return random_chain(random.Random(seed), n, n_items, spans=spans, releases=draw(st.booleans()))


def seconds(solution: Solution) -> float:
    return float("inf") if solution.extra_s is None else solution.extra_s


@settings(max_examples=200, deadline=None, derandomize=True)
@given(chains(), st.integers(-3, 150), st.integers(0, 80))
def test_a_larger_budget_is_never_slower_and_no_peak_is_above_its_budget(chain: Chain, above: int, more: int) -> None:
    least = floor(chain).peak_bytes
    small, large = solve(chain, least + above), solve(chain, least + above + more)
    assert seconds(large) <= seconds(small)
    assert (small.items is None) == (above < 0)
    for solution, budget in ((small, least + above), (large, least + above + more)):
        if solution.items is not None:
            assert solution.peak_bytes == chain.peak_bytes(solution.items) <= budget
            assert solution.extra_s == extra_s(solution.items)
            assert solution.peak_bytes >= solution.floor_bytes == least


@settings(max_examples=100, deadline=None, derandomize=True)
@given(chains())
def test_each_point_of_the_front_is_the_answer_to_its_own_peak(chain: Chain) -> None:
    points = front(chain)
    assert points[0].peak_bytes == floor(chain).peak_bytes
    for k, point in enumerate(points):
        assert point.peak_bytes is not None
        at, below = solve(chain, point.peak_bytes), solve(chain, point.peak_bytes - 1)
        assert (at.peak_bytes, at.extra_s) == (point.peak_bytes, point.extra_s)
        assert seconds(below) == (seconds(points[k - 1]) if k else float("inf"))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chains(), st.integers(0, 100), st.sampled_from([2**30, 3, 10**9 + 7]))
def test_units_of_bytes_and_seconds_do_not_matter(chain: Chain, above: int, factor: int) -> None:
    scaled = replace(
        chain,
        items=tuple(
            tuple(
                made_item(
                    item.start,
                    item.stop,
                    item.kept_bytes * factor,
                    item.forward_peak_bytes * factor,
                    item.backward_peak_bytes * factor,
                    item.extra_s * 1e-6,
                    item.released_bytes * factor,
                )
                for item in row
            )
            for row in chain.items
        ),
        start_bytes=chain.start_bytes * factor,
        head_peak_bytes=chain.head_peak_bytes * factor,
        head_backward_peak_bytes=chain.head_backward_peak_bytes * factor,
        later_bytes=tuple(b * factor for b in chain.later_bytes),
        fixed_peak_bytes=chain.fixed_peak_bytes * factor,
    )
    budget = floor(chain).peak_bytes + above
    one, other = solve(chain, budget), solve(scaled, budget * factor)
    assert other.peak_bytes == (one.peak_bytes or 0) * factor
    assert other.extra_s == pytest.approx(seconds(one) * 1e-6, rel=1e-9)


def true_best(chain: Chain, budget: int) -> float:
    """Give the best time by the whole front, which knows no widths."""
    return min(seconds(point) for point in front(chain, None) if (point.peak_bytes or 0) <= budget)


def test_where_labels_cannot_prove_it_highs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "WIDTHS", (1,))
    rng = random.Random(4)
    methods = set()
    for _ in range(40):
        chain = random_chain(rng, rng.randint(4, 10), 4, spans=True, whole=False)
        budget = floor(chain).peak_bytes + rng.randint(0, 60)
        found = solve(chain, budget)
        assert found.proven_optimal and found.gap == 0.0
        assert found.extra_s == pytest.approx(true_best(chain, budget), abs=1e-8)
        methods.add(found.method)
    assert methods == {"labels", "highs"}


def test_a_wide_pass_that_drops_what_cannot_win_proves_what_a_narrow_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "WIDTHS", (1, 3, 10**6))
    rng = random.Random(8)
    for k in range(120):
        chain = random_chain(rng, rng.randint(4, 12), 4, spans=k % 2 == 0, whole=False, releases=k % 3 == 0)
        budget = floor(chain).peak_bytes + rng.randint(0, 60)
        found = solve(chain, budget)
        assert (found.method, found.proven_optimal) == ("labels", True)
        assert found.extra_s == true_best(chain, budget)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chains(), st.integers(0, 100))
def test_no_prefix_that_fits_is_faster_than_its_bound(chain: Chain, above: int) -> None:
    table, rng = Table(chain), random.Random(above)
    room = floor(chain).peak_bytes + above - chain.start_bytes
    limits = Limits(table, room)
    for _ in range(60):
        at, sums, time = 0, np.zeros((table.n_sums, 1), dtype=np.int64), 0
        while at < chain.n_blocks:
            group = rng.choice(table.groups[at])
            k = rng.randrange(len(group.items))
            if (group.need[:, k : k + 1] > room - sums).any():
                break
            at, sums, time = group.stop, sums + group.kept[:, k : k + 1], time + int(group.time[k])
            least = limits.least[at]
            assert least is not None and (least <= sums).all()
            assert limits.seconds(at, room - sums)[0] <= time


def test_an_item_that_needs_less_than_nothing_is_found_by_both() -> None:
    items = ((made_item(0, 1, 0, 100, 100, 0.0), made_item(0, 2, -10, -10, -10, 1.0)), (made_item(1, 2, 0, 9, 9, 0.0),))
    chain = replace(
        gpt_chain(2, 2), items=items, start_bytes=50, later_bytes=(0, 0, 0), head_peak_bytes=0, fixed_peak_bytes=0
    )
    for method in ("labels", "highs"):
        found = solve(chain, 45, method=method)
        assert (found.peak_bytes, found.extra_s, found.proven_optimal) == (40, 1.0, True)


def test_a_gap_is_never_smaller_than_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "WIDTHS", (1,))
    rng = random.Random(4)
    unproven = missed = 0
    for _ in range(60):
        chain = random_chain(rng, rng.randint(4, 10), 4, spans=True, whole=False)
        budget = floor(chain).peak_bytes + rng.randint(0, 60)
        found = solve(chain, budget, method="labels")
        assert found.peak_bytes is not None and found.peak_bytes <= budget
        miss = seconds(found) - true_best(chain, budget)
        assert found.proven_optimal == (found.gap == 0.0)
        assert found.gap * (chain.plain_s + seconds(found)) >= miss - 1e-9
        unproven += not found.proven_optimal
        missed += miss > 1e-9
    assert unproven >= missed > 0


def test_out_of_time_the_best_known_plan_and_its_gap_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "WIDTHS", (1,))
    chain = gpt_chain(96, 10, seed=1, spans=True)
    budget = floor(chain).peak_bytes
    found = solve(chain, budget, time_limit_s=0.01)
    assert (found.method, found.proven_optimal) == ("highs", False)
    assert found.peak_bytes is not None and found.peak_bytes <= budget
    assert 0 < found.gap < 0.05


def test_a_part_of_the_front_is_exact_and_spans_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = gpt_chain(12, 5, seed=2)
    whole = front(chain, None)
    thin = front(chain, 10)
    monkeypatch.setattr(solving, "FRONT_WIDTHS", {1: 20})
    sampled = front(chain)
    assert len(whole) > 64 and len(thin) <= 10 and 20 < len(sampled) <= 48
    for part in (thin, sampled):
        points = {(point.peak_bytes, point.extra_s) for point in whole}
        assert {(point.peak_bytes, point.extra_s) for point in part} <= points
        assert (part[0].peak_bytes, part[-1].extra_s) == (whole[0].peak_bytes, 0.0)


def test_the_owner_is_the_line_that_is_highest() -> None:
    plan = [made_item(0, 1, 10, 30, 20, 0.0), made_item(1, 3, 5, 8, 9, 1.0)]
    chain = Chain(
        n_blocks=3,
        items=((plan[0],), (plan[1],), (made_item(2, 3, 1, 1, 1, 0.0),)),
        start_bytes=100,
        head_peak_bytes=10,
        later_bytes=(0, 4, 0, 3),
        fixed_peak_bytes=50,
        plain_s=1.0,
    )
    assert owner(chain, plan) == "forward of block 0"
    assert floor(chain).owner == "forward of block 0"
    assert owner(replace(chain, later_bytes=(0, 40, 0, 3)), plan) == "backward of block 0"
    assert owner(replace(chain, later_bytes=(0, 4, 0, 30)), plan) == "backward of blocks 1 to 2"
    assert owner(replace(chain, head_peak_bytes=16), plan) == "head and loss"
    assert owner(replace(chain, head_backward_peak_bytes=16), plan) == "head and loss"
    assert owner(replace(chain, fixed_peak_bytes=130), plan) == "fixed"


def test_among_plans_of_equal_time_the_lower_peak_is_given() -> None:
    items = (
        (made_item(0, 1, 50, 50, 50, 0.0), made_item(0, 1, 10, 10, 10, 0.3)),
        (made_item(1, 2, 40, 40, 40, 0.0), made_item(1, 2, 30, 30, 30, 0.1), made_item(1, 2, 20, 20, 20, 0.2)),
        (made_item(2, 3, 40, 40, 40, 0.0), made_item(2, 3, 20, 20, 20, 0.1)),
    )
    chain = Chain(
        n_blocks=3,
        items=items,
        start_bytes=0,
        head_peak_bytes=0,
        later_bytes=(0,) * 4,
        fixed_peak_bytes=0,
        plain_s=1.0,
    )
    # 0.3 s either way: 10 + 40 + 40, or 50 + 20 + 20; and 0.1 + 0.2 is not 0.3 in floats.
    assert solve(chain, 90).peak_bytes == 90
    lower = replace(chain, items=(items[0], items[1], (items[2][0], made_item(2, 3, 15, 15, 15, 0.1))))
    assert solve(lower, 90).peak_bytes == 85


def test_neighbours_may_trade_only_where_that_never_raises_the_peak() -> None:
    assert all(may_sort(Table(gpt_chain(6, 4)), i) for i in range(5))
    assert not any(may_sort(Table(gpt_chain(6, 4, seed=1)), i) for i in range(5))
    items = tuple((made_item(i, i + 1, 9, 0, 0, 0.0), made_item(i, i + 1, 1, 0, 50, 1.0)) for i in range(2))
    chain = replace(gpt_chain(2, 2), items=items, later_bytes=(80, 40, 0), head_peak_bytes=0)
    # The recomputed block needs most, and gradients make it worst in front.
    assert not may_sort(Table(chain), 0)


def test_nothing_of_the_solver_reaches_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    import os

    with silent_stdout():
        os.write(1, b"inner workings")
    os.write(1, b"after")
    assert capfd.readouterr().out == "after"


@pytest.mark.parametrize(("n_sums", "size"), [(1, 9), (2, 5), (2, 60)])
def test_only_beaten_labels_are_left_out(n_sums: int, size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(150):
        rise, time = rng.integers(0, size, (n_sums, 120)), rng.integers(0, 9, 120)
        kept = unbeaten(rise, time)
        rows = np.vstack([rise, time]).T
        picked = rows[kept]
        assert len(np.unique(picked, axis=0)) == len(picked)
        beaten = (picked[None] <= rows[:, None]).all(axis=2)
        assert beaten.any(axis=1).all(), "what was left out is beaten by something that stayed"
        if size < 24:
            assert (beaten[kept].sum(axis=1) == 1).all(), "nothing that stayed is beaten"


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, labels or highs"):
        solve(gpt_chain(2, 2), 10**12, method="simplex")

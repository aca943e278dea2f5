"""The search for the largest size that fits: right for every monotone need, and in few trials for straight ones."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckbench.largest import Found, search


def brute_force(needs: list[int | None], budget: int | None) -> int:
    """Count the sizes, from 1 on, that fit before the first that does not."""
    n = 0
    for need in needs:
        if need is None or (budget is not None and need > budget):
            break
        n += 1
    return n


@st.composite
def monotone(draw: st.DrawFn) -> list[int | None]:
    """Needs of the sizes 1, 2, ...: they never fall, and from some size on there is no memory at all."""
    steps = draw(st.lists(st.integers(0, 9), min_size=1, max_size=60))
    needs: list[int | None] = []
    total = draw(st.integers(0, 30))
    for grown in steps:
        total += grown
        needs.append(total)
    ran_out = draw(st.integers(0, len(needs)))
    return [need if i < ran_out else None for i, need in enumerate(needs)]


@given(monotone(), st.integers(0, 200) | st.none(), st.integers(1, 500), st.sampled_from([1, 3, 64]))
def test_finds_what_trying_every_size_finds(needs: list[int | None], budget: int | None, start: int, step: int) -> None:
    tried: list[int] = []

    def weigh(size: int) -> int | None:
        assert size % step == 0 and step <= size <= len(needs) * step
        assert size not in tried, "no size is tried twice"
        tried.append(size)
        return needs[size // step - 1]

    found = search(weigh, start=start, step=step, most=len(needs) * step, budget_bytes=budget)
    n = brute_force(needs, budget)
    assert found.size == n * step
    assert found.n_trials == len(tried)
    if n:
        assert found.size in tried and found.size_bytes == needs[n - 1]
    if n < len(needs):
        assert found.next_size == (n + 1) * step in tried and found.next_bytes == needs[n]
    else:
        assert (found.next_size, found.next_bytes) == (None, None)


@pytest.mark.parametrize("largest", [1, 2, 7, 100, 1234, 50_000])
def test_a_straight_line_takes_few_trials(largest: int) -> None:
    def weigh(size: int) -> int:
        return 1000 + 10 * size

    found = search(weigh, start=8, step=1, most=10**6, budget_bytes=1000 + 10 * largest + 5)
    assert found.size == largest
    # growing at most fourfold a trial, then both neighbours of the limit
    assert found.n_trials <= 4 + math.log(max(largest, 8) / 8, 4) + (4 if largest < 8 else 0)


@pytest.mark.parametrize("power", [0.5, 2.0, 3.0])
def test_a_curve_takes_no_more_than_twice_what_halving_takes(power: float) -> None:
    def weigh(size: int) -> int:
        return int(1000 + size**power)

    found = search(weigh, start=8, step=1, most=10**6, budget_bytes=int(1000 + 5000.0**power))
    assert found.size == 5000 or weigh(found.size) == weigh(5000)
    assert found.n_trials <= 2 * (math.log2(5000) + 3)


def test_out_of_memory_is_a_limit_without_a_budget() -> None:
    def weigh(size: int) -> int | None:
        return size if size <= 37 else None

    found = search(weigh, start=4, step=1, most=1000, budget_bytes=None)
    assert found == Found(size=37, size_bytes=37, next_size=38, next_bytes=None, n_trials=found.n_trials)


def test_nothing_fits() -> None:
    def weigh(size: int) -> Any:
        return 100 * size

    found = search(weigh, start=64, step=1, most=1000, budget_bytes=50)
    assert (found.size, found.next_size, found.next_bytes) == (0, 1, 100)

"""Intervals against exact binomial sums and small simulations; ratios that know when there is no difference."""

import math
import random
import statistics as plain
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckbench.statistics import (
    T_QUANTILES,
    count_outliers,
    geometric_interval,
    median_absolute_deviation,
    median_interval,
    median_ranks,
    paired_ratio,
    relative_half_width,
    t_quantile,
)

TIMES = st.floats(1e-6, 1e3)


def below(n_samples: int, rank: int) -> Fraction:
    """P(at most ``rank`` of n fair coins show heads), exactly."""
    return Fraction(sum(math.comb(n_samples, k) for k in range(rank + 1)), 2**n_samples)


@pytest.mark.parametrize("confidence", [0.90, 0.95, 0.99])
@pytest.mark.parametrize("n_samples", [*range(1, 41), 99, 100, 199, 200, 1000])
def test_ranks_are_the_tightest_that_hold(n_samples: int, confidence: float) -> None:
    tail = Fraction(str(round(1 - confidence, 6))) / 2
    ranks = median_ranks(n_samples, confidence)
    if ranks is None:
        assert below(n_samples, 0) > tail
        return
    low, high = ranks
    assert 0 <= low < high == n_samples - 1 - low
    assert 1 - 2 * below(n_samples, low) >= Fraction(str(confidence)), "the interval holds what it promises"
    assert below(n_samples, low + 1) > tail, "and no tighter one does"


def test_known_ranks() -> None:
    assert [median_ranks(n) for n in (5, 6, 8, 9, 20)] == [None, (0, 5), (0, 7), (1, 7), (5, 14)]


def test_few_samples_have_no_interval() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (2.0, None, None)
    assert relative_half_width([3.0, 1.0, 2.0]) is None
    assert relative_half_width([0.0] * 10) is None


@given(st.lists(TIMES, min_size=6, max_size=60))
def test_the_interval_holds_the_median(samples: list[float]) -> None:
    middle, low, high = median_interval(samples)
    assert low is not None and high is not None
    assert middle == plain.median(samples)
    assert low <= middle <= high
    assert low in samples and high in samples
    width = relative_half_width(samples)
    assert width is not None and width == pytest.approx((high - low) / 2 / middle)


@pytest.mark.parametrize("n_samples", [6, 11, 30])
@pytest.mark.parametrize("shape", ["normal", "skewed"])
def test_coverage_by_simulation(n_samples: int, shape: str) -> None:
    """2000 experiments: the true median lies inside at least 95 % of the intervals, three errors allowed."""
    rng = random.Random(5)
    draw, truth = (lambda: rng.gauss(10, 1), 10.0) if shape == "normal" else (lambda: rng.lognormvariate(0, 1), 1.0)
    inside, n = 0, 2000
    for _ in range(n):
        _, low, high = median_interval([draw() for _ in range(n_samples)])
        assert low is not None and high is not None
        inside += low <= truth <= high
    assert inside / n >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / n)


def test_spread() -> None:
    assert median_absolute_deviation([1.0, 2.0, 3.0, 4.0, 100.0]) == 1.0
    assert median_absolute_deviation([5.0]) == 0.0


def test_outliers() -> None:
    calm = [1.0, 1.01, 0.99, 1.02, 0.98]
    assert count_outliers(calm) == 0
    assert count_outliers([*calm, 1.5]) == 1
    assert count_outliers([*calm, 1.5, 0.2]) == 2
    assert count_outliers([1.0, 9.0]) == 0, "two samples have no middle to be far from"
    assert count_outliers([1.0, 1.0, 1.0, 1.0, 1.1]) == 1, "with no spread at all, whatever differs stands out"
    assert count_outliers([1.0, 1.0, 1.0, 1.0 + 1e-12]) == 0


@given(st.lists(TIMES, min_size=1, max_size=20))
def test_equal_samples_have_ratio_one(samples: list[float]) -> None:
    ratio, low, high = paired_ratio(samples, samples)
    assert ratio == 1.0
    assert (low, high) == ((None, None) if len(samples) == 1 else (1.0, 1.0))


def test_a_constant_ratio_has_no_width() -> None:
    ratio, low, high = paired_ratio([1.5, 3.0, 0.3], [1.0, 2.0, 0.2])
    assert (ratio, low, high) == (pytest.approx(1.5), pytest.approx(1.5), pytest.approx(1.5))


def test_the_interval_by_hand() -> None:
    """Logarithms 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, and 4.3027 for two degrees of freedom."""
    half = 4.3027 * 0.1 / math.sqrt(3)
    ratio, low, high = paired_ratio([math.exp(x) for x in (0.1, 0.2, 0.3)], [1.0, 1.0, 1.0])
    wanted = [math.exp(x) for x in (0.2, 0.2 - half, 0.2 + half)]
    assert [ratio, low, high] == pytest.approx(wanted, rel=1e-4)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=2, max_size=12))
def test_swapping_the_sides_inverts_the_ratio(pairs: list[tuple[float, float]]) -> None:
    ahead = paired_ratio([a for a, _ in pairs], [b for _, b in pairs])
    behind = paired_ratio([b for _, b in pairs], [a for a, _ in pairs])
    assert ahead[1] is not None and ahead[2] is not None and behind[1] is not None and behind[2] is not None
    assert ahead[0] == pytest.approx(1 / behind[0], rel=1e-9)
    for end, other in ((ahead[1], behind[2]), (ahead[2], behind[1])):
        if 1e-200 < end < 1e200:
            assert end == pytest.approx(1 / other, rel=1e-6)


def test_rounds_must_pair_up() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0, 2.0], [1.0])


def test_paired_coverage_by_simulation() -> None:
    """Rounds share their machine's mood; the interval of five rounds holds the true ratio 95 % of the time."""
    rng = random.Random(6)
    inside, n, truth = 0, 2000, 1.3
    for _ in range(n):
        moods = [rng.lognormvariate(0, 0.3) for _ in range(5)]
        ours = [truth * mood * rng.lognormvariate(0, 0.02) for mood in moods]
        theirs = [mood * rng.lognormvariate(0, 0.02) for mood in moods]
        _, low, high = paired_ratio(ours, theirs)
        assert low is not None and high is not None
        inside += low <= truth <= high
    assert abs(inside / n - 0.95) <= 3 * math.sqrt(0.95 * 0.05 / n)


def test_student_t() -> None:
    """Tabulated two-sided 95 % points."""
    for degrees, point in ((1, 12.7062), (2, 4.3027), (4, 2.7764), (10, 2.2281), (1000, 1.9623)):
        assert t_quantile(degrees) == pytest.approx(point, abs=5e-5)


def test_going_on_until_precise_keeps_the_interval_honest() -> None:
    """Stein's two stages: the first rounds' scatter decides on more and gives the interval; all rounds' scatter,
    which looks small whenever the study stops, would hold the truth too seldom."""
    generator = random.Random(5)
    n_first, most, target, n_studies = 4, 15, 0.01, 4000
    held = {"first": 0, "all": 0}
    for _ in range(n_studies):
        ratios = [math.exp(generator.gauss(0.0, 0.014)) for _ in range(most)]
        for kind in held:
            for n in range(n_first, most + 1):
                _, low, high = geometric_interval(ratios[:n], n_first if kind == "first" else None)
                assert low is not None and high is not None
                if (high - low) / 2 <= target or n == most:
                    held[kind] += low <= 1.0 <= high
                    break
    assert 0.94 <= held["first"] / n_studies <= 0.96
    assert held["all"] / n_studies < 0.935


def test_the_quantiles_kept_are_scipy_s() -> None:
    from scipy.special import stdtrit

    assert [float(stdtrit(n, 0.975)) for n in range(1, len(T_QUANTILES) + 1)] == pytest.approx(T_QUANTILES, rel=1e-13)
    assert t_quantile(31) == float(stdtrit(31, 0.975))

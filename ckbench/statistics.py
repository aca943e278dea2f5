"""Medians, intervals and ratios of step times, and straight lines through figures, with their sources."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ckbench import interrupts

CONFIDENCE = 0.95
MIN_DRIFT_SAMPLES = 8
WARM_WINDOW = 3
WARM_FALL = 0.05
T_QUANTILES = (
    12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934, 2.5705818356363146,
    2.4469118511449786, 2.364624251592784, 2.306004135204166, 2.262157162798205, 2.228138851986274,
    2.200985160091639, 2.1788128296672284, 2.1603686564627913, 2.144786687917804, 2.131449545559776,
    2.1199052992212546, 2.1098155778333156, 2.1009220402410382, 2.0930240544083087, 2.085963447265864,
    2.0796138447276795, 2.0738730679040254, 2.0686576104190486, 2.0638985616280245, 2.0595385527532972,
    2.0555294386428735, 2.0518305164802846, 2.0484071417952454, 2.045229642132703, 2.0422724563012378,
)  # fmt: skip
"""97.5 % points of Student's t for 1 to 30 degrees of freedom, from scipy.special.stdtrit: loading scipy takes a third
of a second, and few studies have more rounds."""
OUTLIER_MADS = 14.826  # hyperfine's threshold: a modified z-score of 10


@cache
def median_ranks(n_samples: int, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """Give the two order statistics (from 0) that hold the median with at least ``confidence``.

    Distribution-free: the number of samples below the median is binomial(n, 1/2). None when even
    the smallest and largest of ``n_samples`` are not enough (fewer than 6 at 95 %).
    Source: Conover, Practical Nonparametric Statistics, section 3.2.
    """
    tail = (1.0 - confidence) / 2
    cumulative, rank = 0.0, -1
    for k in range(n_samples // 2 + 1):
        cumulative += math.exp(
            math.lgamma(n_samples + 1) - math.lgamma(k + 1) - math.lgamma(n_samples - k + 1) - n_samples * math.log(2)
        )
        if cumulative > tail:
            break
        rank = k
    return None if rank < 0 else (rank, n_samples - 1 - rank)


def median_interval(samples: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Give the median and the ends of its 95 % interval; the ends are None with too few samples."""
    ordered = sorted(samples)
    ranks = median_ranks(len(ordered))
    middle = statistics.median(ordered)
    if ranks is None:
        return middle, None, None
    return middle, ordered[ranks[0]], ordered[ranks[1]]


def relative_half_width(samples: Sequence[float]) -> float | None:
    """Give half the interval of the median over the median; None where there is no interval."""
    middle, low, high = median_interval(samples)
    if low is None or high is None or middle <= 0:
        return None
    return (high - low) / 2 / middle


def median_absolute_deviation(samples: Sequence[float]) -> float:
    """Give the median distance from the median."""
    middle = statistics.median(samples)
    return statistics.median(abs(x - middle) for x in samples)


def count_outliers(samples: Sequence[float]) -> int:
    """Count samples further than 14.8 median absolute deviations from the median."""
    if len(samples) < 3:
        return 0
    middle, deviation = statistics.median(samples), median_absolute_deviation(samples)
    if deviation == 0:
        return sum(1 for x in samples if not math.isclose(x, middle, rel_tol=1e-9))
    return sum(1 for x in samples if abs(x - middle) > OUTLIER_MADS * deviation)


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], n_first: int | None = None
) -> tuple[float, float | None, float | None]:
    """Give the ratio of two strategies paired by round, with a 95 % interval.

    Student's t on the logarithms of the rounds' ratios: geometric mean, and the interval
    exp(mean ± t·s/sqrt(n)). One round has a ratio but no interval. ``n_first`` as in ``geometric_interval``.
    """
    return geometric_interval([a / b for a, b in zip(numerators, denominators, strict=True)], n_first)


def geometric_interval(values: Sequence[float], n_first: int | None = None) -> tuple[float, float | None, float | None]:
    """Give the geometric mean of positive values and its 95 % interval: Student's t on their logarithms.

    One value has no interval. ``n_first``: how many of the values decided whether more were taken (None: no look was
    taken). The scatter then comes from those alone, with their degrees of freedom, which keeps the interval honest
    whatever the rule to go on was: it can depend on the first values' scatter only, and that is independent of the
    mean. With the scatter of all values, stopping when they happen to agree makes it too narrow.
    Source: Stein 1945, A two-sample test for a linear hypothesis whose power is independent of the variance.
    (Plain sums: the standard library's exact fractions take a thousandfold longer.)
    """
    logs = [math.log(value) for value in values]
    mean = math.fsum(logs) / len(logs)
    first = logs[:n_first]
    if len(first) < 2:
        return math.exp(mean), None, None
    centre = math.fsum(first) / len(first)
    deviation = math.sqrt(math.fsum((x - centre) ** 2 for x in first) / (len(first) - 1))
    half = t_quantile(len(first) - 1) * deviation / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def drift(samples: Sequence[float]) -> tuple[float, float] | None:
    """Give the relative change from the first to the last sample, and how likely chance alone makes it.

    Theil-Sen slope over the median, and the p-value of Kendall's tau against time (the Mann-Kendall
    test), both from scipy and both untouched by outliers. None with fewer than 8 samples.
    """
    if len(samples) < MIN_DRIFT_SAMPLES:
        return None
    with interrupts.deferred():
        from scipy import stats

    order = range(len(samples))
    if max(samples) == min(samples):
        return 0.0, 1.0
    slope = float(stats.theilslopes(samples, order).slope)
    p_value = float(stats.kendalltau(order, samples).pvalue)
    return slope * (len(samples) - 1) / statistics.median(samples), p_value


def still_warming_up(samples: Sequence[float]) -> bool:
    """Tell whether the last steps are faster than those before them by more than they scatter.

    Compares the medians of the last two windows of three; a fall of more than 5 % says yes.
    """
    if len(samples) < 2 * WARM_WINDOW:
        return True
    before, after = samples[-2 * WARM_WINDOW : -WARM_WINDOW], samples[-WARM_WINDOW:]
    return statistics.median(after) < (1 - WARM_FALL) * statistics.median(before)


@cache
def t_quantile(degrees: int) -> float:
    """Give the 97.5 % point of Student's t, from scipy."""
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    with interrupts.deferred():
        from scipy.special import stdtrit  # scipy.special alone loads in a tenth of scipy.stats' second

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2))


@dataclass(frozen=True, kw_only=True)
class Line:
    """y = start + slope·x, with the share of the scatter that it explains."""

    start: float
    slope: float
    r2: float


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Fit by least squares; needs two different x. R² is 1 where all y are equal.

    >>> fit_line([1, 2, 3], [3, 5, 7])
    Line(start=1.0, slope=2.0, r2=1.0)
    """
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    spread = math.fsum((x - mean_x) ** 2 for x in xs)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    start = mean_y - slope * mean_x
    left = math.fsum((y - start - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    total = math.fsum((y - mean_y) ** 2 for y in ys)
    return Line(start=start, slope=slope, r2=1.0 if total == 0 else 1 - left / total)

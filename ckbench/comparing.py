"""Two sets of results side by side: rows paired by configuration, ratios B / A, and what a threshold says of them.

A threshold fails a row only where the row's interval lies wholly above it. The intervals of all rows hold together
with 95 % confidence, so that a gate over many rows raises no more false alarms than one over a single row: where
nothing changed, at most 2.5 % of gates do, and none to speak of with a threshold above the noise.
"""

import json
import math
import re
import statistics as plain
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

from pydantic import BaseModel

from ckbench import interrupts
from ckbench.compare import SAME_ENVIRONMENT, Row, first_stage, gather, look_up, sort_key, varied_keys
from ckbench.config import TrainConfig, digest, model_class
from ckbench.errors import ConfigError
from ckbench.registry import did_you_mean
from ckbench.statistics import CONFIDENCE
from ckbench.table import cell

QUANTITIES = {"step": "step time", "peak": "peak memory"}
MOST_ABOVE = 10**6
"""Percent; nobody means more, and ratios stay finite."""
_THRESHOLD = re.compile(r"\s*([\w-]+)\s*:\s*([+-]?(?:\d{1,12}(?:\.\d{0,12})?|\.\d{1,12}))\s*%\s*")


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """How much larger B may be than A."""

    quantity: str
    """step or peak."""
    above: Fraction
    """Relative, exactly as typed: 3 % is 3/100."""

    def __str__(self) -> str:
        return f"{self.quantity} {float(self.above * 100):g} %"


@dataclass(kw_only=True)
class Pair:
    """One configuration in both sets."""

    before: Row
    after: Row
    step_ratio: float | None = None
    step_low: float | None = None
    step_high: float | None = None
    """Ends of the interval of the step ratio; None where a set has a single round."""
    peak_ratio: Fraction | None = None
    """Exact: of bytes."""
    told: dict[str, str] = field(default_factory=dict)
    """What each threshold says, by quantity: above, within or undecided."""

    @property
    def is_ok(self) -> bool:
        """Whether both ended ok."""
        return self.before.is_ok and self.after.is_ok

    @property
    def is_lost(self) -> bool:
        """Whether B did not end ok where A did."""
        return self.before.is_ok and not self.after.is_ok

    @property
    def verdict(self) -> str:
        """Sum up: lost, fixed, not ok, above, undecided, within, or not asked."""
        if self.is_lost:
            return "lost"
        if not self.is_ok:
            return "fixed" if self.after.is_ok else "not ok"
        said = set(self.told.values())
        return next((word for word in ("above", "undecided", "within") if word in said), "not asked")


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What two sets have in common, and what they have not."""

    pairs: list[Pair]
    only_a: list[Row]
    only_b: list[Row]
    varied: tuple[str, ...]
    """Dotted keys of model and train, and device_name, that differ between rows."""
    n_older: tuple[int, int]
    """Rows of A and of B that a newer one of the same configuration stands for."""
    thresholds: tuple[Threshold, ...]

    @property
    def is_failed(self) -> bool:
        """Whether a threshold was asked for, and a row is above it or no longer ends ok."""
        return bool(self.thresholds) and any(pair.verdict in ("above", "lost") for pair in self.pairs)

    def name(self, row: Row) -> str:
        """Name a row by its strategy and by what varies."""
        place = ", ".join(f"{key.partition('.')[2] or 'on'} {cell(look_up(row.values, key))}" for key in self.varied)
        return f"{row.label} ({place})" if place else row.label


def parse_thresholds(texts: Iterable[str]) -> tuple[Threshold, ...]:
    """Read ``step:3%`` and ``peak:1%``; at most one of each quantity.

    >>> [str(threshold) for threshold in parse_thresholds(["step:3%", "peak:0.5%"])]
    ['step 3 %', 'peak 0.5 %']

    Raises ConfigError with a sentence for people.
    """
    found: dict[str, Threshold] = {}
    for text in texts:
        match = _THRESHOLD.fullmatch(text)
        if match is None:
            raise ConfigError(f"--fail-above {text!r}: write a quantity and percent, for example step:3% or peak:1%")
        quantity, percent = match[1], Fraction(match[2])
        if quantity not in QUANTITIES:
            raise ConfigError(
                f"--fail-above {text!r}: unknown quantity {quantity!r}{did_you_mean(quantity, QUANTITIES)}"
            )
        if not -100 < percent <= MOST_ABOVE:
            raise ConfigError(f"--fail-above {text!r}: write more than -100% and at most {MOST_ABOVE}%")
        if quantity in found:
            raise ConfigError(f"--fail-above gives {quantity} twice; keep one of them")
        found[quantity] = Threshold(quantity=quantity, above=percent / 100)
    return tuple(found.values())


def compare_sets(
    records_a: Iterable[dict[str, Any]],
    records_b: Iterable[dict[str, Any]],
    thresholds: Sequence[Threshold] = (),
    *,
    allow_different_device: bool = False,
) -> Paired:
    """Pair the rows of two sets of records by model, train and strategy, and judge each pair.

    Rows on devices of different names are paired only with ``allow_different_device``, and then only what has no
    partner on its own device. Of several rows of one configuration on one device (another seed, version or number of
    threads) the newest counts. Raises ConfigError where nothing can be paired, and where both sets hold the same
    records.
    """
    rows_a, n_older_a = _newest(gather(records_a, all_sessions=False))
    rows_b, n_older_b = _newest(gather(records_b, all_sessions=False))
    pairs = [Pair(before=rows_a.pop(key), after=rows_b.pop(key)) for key in list(rows_a) if key in rows_b]
    across = [(a, b) for a in rows_a for b in rows_b if a[0] == b[0]]
    if allow_different_device:
        for a, b in across:
            if a in rows_a and b in rows_b:
                pairs.append(Pair(before=rows_a.pop(a), after=rows_b.pop(b)))
    if not pairs:
        raise ConfigError(_why_nothing_pairs(across))
    if any(_record_ids(pair.before) & _record_ids(pair.after) for pair in pairs):
        raise ConfigError("A and B hold the same records; compare two measurements, each in a place of its own")
    n_timed = sum(pair.is_ok and bool(pair.before.rounds) and bool(pair.after.rounds) for pair in pairs)
    for pair in pairs:
        _relate(pair, n_timed)
        pair.told = {each.quantity: _judge(pair, each) for each in thresholds} if pair.is_ok else {}
    varied = _varied(
        [*(pair.before for pair in pairs), *rows_a.values()], [*(p.after for p in pairs), *rows_b.values()]
    )
    pairs.sort(key=lambda pair: [sort_key(pair.before.values, key) for key in varied])
    return Paired(
        pairs=pairs,
        only_a=list(rows_a.values()),
        only_b=list(rows_b.values()),
        varied=varied,
        n_older=(n_older_a, n_older_b),
        thresholds=tuple(thresholds),
    )


def welch_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    confidence: float = CONFIDENCE,
    n_first: tuple[int | None, int | None] = (None, None),
) -> tuple[float, float | None, float | None]:
    """Give the ratio of two independent sets of positive values, with its interval.

    Ratio of the geometric means; the interval is Welch's t on the logarithms: exp(d ± t·sqrt(v1 + v2)) with v = s²/n
    of each set and Welch-Satterthwaite's degrees of freedom, so that sets may scatter differently. A set of one value
    has no scatter, and the ratio then no interval. ``n_first`` as in ``geometric_interval``, for either set: where the
    first values' scatter decided on more, it alone counts, with its own degrees of freedom.
    Sources: Welch 1947, The generalization of Student's problem when several different population variances are
    involved; Satterthwaite 1946, An approximate distribution of estimates of variance components.
    """
    means, variances, degrees = [], [], []
    for values, first_n in ((numerators, n_first[0]), (denominators, n_first[1])):
        logs = [math.log(value) for value in values]
        first = logs[:first_n]
        means.append(math.fsum(logs) / len(logs))
        degrees.append(len(first) - 1)
        variances.append(plain.variance(first) / len(logs) if len(first) > 1 else math.nan)
    difference = means[0] - means[1]
    if min(degrees) < 1:
        return math.exp(difference), None, None
    variance = math.fsum(variances)
    if variance == 0:
        return (math.exp(difference),) * 3
    # Shares, whose squares cannot vanish: a variance may be as small as the last digit of a logarithm
    n_degrees = 1 / math.fsum((v / variance) ** 2 / n for v, n in zip(variances, degrees, strict=True))
    half = _t_point(n_degrees, 0.5 + confidence / 2) * math.sqrt(variance)
    return math.exp(difference), math.exp(difference - half), math.exp(min(difference + half, 700.0))


def _t_point(degrees: float, probability: float) -> float:
    """Give a point of Student's t for any degrees of freedom, from scipy."""
    with interrupts.deferred():
        from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def _newest(rows: Iterable[Row]) -> tuple[dict[tuple[str, str], Row], int]:
    """Keep one row per configuration and device name, the newest; count the others."""
    kept: dict[tuple[str, str], Row] = {}
    ordered = sorted(rows, key=lambda row: max(record["started_at"] for record in row.records))
    for row in ordered:
        kept[_configuration(row), device_of(row)] = row
    by_place = sorted(kept.items(), key=lambda item: item[1].values["order"])
    return dict(by_place), len(ordered) - len(kept)


def _varied(rows_a: Sequence[Row], rows_b: Sequence[Row]) -> tuple[str, ...]:
    """List what tells rows of one set apart; that A and B are on two devices tells no rows apart."""
    keys = varied_keys([*rows_a, *rows_b])
    several = any(len(set(map(device_of, rows))) > 1 for rows in (rows_a, rows_b))
    return keys if several else tuple(key for key in keys if key != "device_name")


def _configuration(row: Row) -> str:
    """Name what is paired. A key that a record lacks was written before the key existed, and had its default."""
    model, train = row.values["model"], row.values["train"]
    cls: type[BaseModel] = model_class(model.get("family"))
    return digest([{**_defaults(cls), **model}, {**_defaults(TrainConfig), **train}, row.label])


@cache
def _defaults(cls: type[BaseModel]) -> dict[str, Any]:
    values = {name: info.default for name, info in cls.model_fields.items() if not info.is_required()}
    return dict(json.loads(json.dumps(values)))


def device_of(row: Row) -> str:
    """Name the device as far as it is known."""
    return str(row.values["device_name"] or row.values["device"])


def _why_nothing_pairs(across: Sequence[tuple[tuple[str, str], tuple[str, str]]]) -> str:
    if not across:
        return "A and B have no configuration (model, train and strategy) in common; measure one study in both"
    before, after = (", ".join(dict.fromkeys(pair[i][1] for pair in across)) for i in (0, 1))
    return (
        f"A was measured on {before} and B on {after}, so their figures say nothing about a change; measure on one "
        "device, or write --allow-different-device to compare them all the same"
    )


def _record_ids(row: Row) -> set[str]:
    return {record["record_id"] for record in row.records if record["record_id"]}


def _relate(pair: Pair, n_timed: int) -> None:
    """Fill the ratios of a pair that is ok; ``n_timed`` pairs share the error of the step intervals (Bonferroni)."""
    if not pair.is_ok:
        return
    before, after = pair.before, pair.after
    peak_a, peak_b = (row.values["peak_allocated_bytes"] for row in (before, after))
    if peak_a and peak_b is not None:
        pair.peak_ratio = Fraction(peak_b, peak_a)
    if before.rounds and after.rounds:
        (times_b, first_b), (times_a, first_a) = _rounds(after), _rounds(before)
        confidence = 1 - (1 - CONFIDENCE) / n_timed
        ratio = welch_ratio(times_b, times_a, confidence, n_first=(first_b, first_a))
        pair.step_ratio, pair.step_low, pair.step_high = ratio


def _rounds(row: Row) -> tuple[list[float], int | None]:
    """Give the rounds' step seconds in order, and how many of them decided on more."""
    numbers = sorted(row.rounds)
    return [row.rounds[number] for number in numbers], first_stage(row.values["run"], numbers)


def _judge(pair: Pair, threshold: Threshold) -> str:
    """Say above or within where the whole interval is, else undecided; a peak is exact and has no interval."""
    limit = 1 + threshold.above
    low: Fraction | float | None
    high: Fraction | float | None
    low, high = (pair.peak_ratio,) * 2 if threshold.quantity == "peak" else (pair.step_low, pair.step_high)
    if low is None or high is None:
        return "undecided"
    if low > limit:
        return "above"
    return "within" if high <= limit else "undecided"


def differences(paired: Paired) -> list[str]:
    """List what else differs between the two sets, with the number of rows: devices, versions, threads, seeds."""
    seen: dict[str, int] = {}
    for pair in paired.pairs:
        before, after = pair.before.values, pair.after.values
        facts = [("device", device_of(pair.before), device_of(pair.after))]
        facts += [(key, before["environment"].get(key), after["environment"].get(key)) for key in SAME_ENVIRONMENT]
        facts.append(("seed", before["run"].get("seed"), after["run"].get("seed")))
        for key, old, new in facts:
            if old != new:
                name = {"code": "ckbench's own code"}.get(key, key.replace("_", " "))
                text = f"{name}: {cell(old) or 'none'} in A, {cell(new) or 'none'} in B"
                seen[text] = seen.get(text, 0) + 1
    n_pairs = len(paired.pairs)
    return [text if n == n_pairs else f"{text} ({n} of {n_pairs} rows)" for text, n in seen.items()]

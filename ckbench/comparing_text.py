"""Two sets of results as text: the verdict in one sentence, the paired rows as a table, and what was not compared."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckbench import reporting
from ckbench.compare import Row, look_up
from ckbench.comparing import QUANTITIES, Pair, Paired, Threshold, device_of, differences
from ckbench.doubts import Doubt
from ckbench.statistics import CONFIDENCE
from ckbench.store import Skipped
from ckbench.table import Column, Table, cell
from ckbench.units import UNKNOWN, clean, format_mib, format_ms, one_line

MANY = 4
VERDICTS = {
    "above": "ABOVE",
    "lost": "NO LONGER OK",
    "fixed": "ok again",
    "not ok": "not ok",
    "undecided": "undecided",
    "within": "within",
    "not asked": UNKNOWN,
}


def draw(
    paired: Paired, paths: tuple[Path, Path], skipped: Sequence[Skipped], *, format_: str, width: int | None
) -> str:
    """Draw a comparison as console, md or json."""
    if format_ == "json":
        return json.dumps(as_json(paired, paths, skipped), indent=1, allow_nan=False) + "\n"
    return reporting.draw_table(_table(paired, paths, skipped), format_=format_, width=width)


def outcome(paired: Paired) -> str:
    """Give failed, undecided or passed; not asked where there is no threshold."""
    if not paired.thresholds:
        return "not asked"
    if paired.is_failed:
        return "failed"
    return "undecided" if any("undecided" in pair.told.values() for pair in paired.pairs) else "passed"


def summary(paired: Paired) -> str:
    """Say in one sentence what came out."""
    lost = [pair for pair in paired.pairs if pair.is_lost]
    gone = "no longer ok: " + _names(paired, lost, lambda pair: f"({pair.after.values['status']})")
    if not paired.thresholds:
        return "no threshold was asked for, so nothing is judged" + (f"; {gone}" if lost else "")
    told = {word: [_told(paired, each, word) for each in paired.thresholds] for word in ("above", "undecided")}
    above, undecided = (list(filter(None, told[word])) for word in ("above", "undecided"))
    if paired.is_failed:
        return "failed: " + "; ".join([*above, *([gone] if lost else [])])
    if undecided:
        return "not failed, but undecided: " + "; ".join(undecided)
    n_judged = sum(1 for pair in paired.pairs if pair.told)
    if not n_judged:
        return "not failed: no row ended ok in both, so nothing could be judged"
    asked = " and ".join(f"{each.quantity} within {_limit(each)}" for each in paired.thresholds)
    return f"passed: {asked} in {n_judged} {'row' if n_judged == 1 else 'rows'}"


def _told(paired: Paired, threshold: Threshold, word: str) -> str:
    pairs = [pair for pair in paired.pairs if pair.told.get(threshold.quantity) == word]

    def amount(pair: Pair) -> str:
        if threshold.quantity == "peak":
            return _change(pair.peak_ratio)
        return f"{_change(pair.step_ratio)} ({_interval(pair)})" if pair.step_low is not None else "(no interval)"

    where = "above" if word == "above" else "perhaps above"
    return (
        f"{QUANTITIES[threshold.quantity]} {where} {_limit(threshold)}: {_names(paired, pairs, amount)}"
        if pairs
        else ""
    )


def _limit(threshold: Threshold) -> str:
    return f"{float(threshold.above * 100):+g} %"


def _names(paired: Paired, pairs: Sequence[Pair], amount: Callable[[Pair], str]) -> str:
    texts = [f"{paired.name(pair.before)} {amount(pair)}" for pair in pairs[:MANY]]
    more = len(pairs) - MANY
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _change(ratio: Any) -> str:
    """Write a ratio as a change; two digits of a small one, so that only equal figures look equal."""
    if ratio is None:
        return UNKNOWN
    if ratio == 1:
        return "same"
    percent = float((ratio - 1) * 100)
    return f"{percent:+.1f} %" if abs(percent) >= 0.1 else f"{percent:+.2g} %"


def _interval(pair: Pair) -> str:
    if pair.step_low is None or pair.step_high is None:
        return UNKNOWN
    low, high = ((end - 1) * 100 for end in (pair.step_low, pair.step_high))
    return f"{low:+.1f}..{high:+.1f} %"


def _table(paired: Paired, paths: tuple[Path, Path], skipped: Sequence[Skipped]) -> Table:
    header = [summary(paired)]
    sides = [
        ("A", paths[0], [*(pair.before for pair in paired.pairs), *paired.only_a]),
        ("B", paths[1], [*(pair.after for pair in paired.pairs), *paired.only_b]),
    ]
    header += [f"{letter}: {path}: {_origin(rows)}" for letter, path, rows in sides]
    header.append(
        f"changes are of B against A; step intervals hold with {CONFIDENCE * 100:g} % for all rows together "
        "(Welch's t on the rounds' logarithms) and know the scatter of rounds, not what else differed between the two"
    )
    for letter, rows in (("A", paired.only_a), ("B", paired.only_b)):
        if rows:
            header.append(f"only in {letter}: {', '.join(map(paired.name, rows))}")
    return Table(
        header=[clean(line) for line in header],
        columns=_columns(paired),
        rows=[Row(values=_values(pair), rounds={}, group="", records=[]) for pair in paired.pairs],
        failures=[one_line(line) for line in _failures(paired)],
        doubts=[Doubt(about="", reason=line) for line in notes(paired)],
        skipped=list(skipped),
    )


def _origin(rows: Sequence[Row]) -> str:
    """Say where a set comes from: studies, devices, versions, dates."""
    studies = dict.fromkeys(str(row.values["study"]) for row in rows)
    devices = dict.fromkeys(map(device_of, rows))
    versions = dict.fromkeys(str(row.values["environment"].get("torch") or "") for row in rows)
    dates = sorted(row.values["started_at"][:10] for row in rows)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    torch = ", ".join(filter(None, versions))
    parts = [f"study {' + '.join(studies)}", ", ".join(devices), f"torch {torch}" if torch else "", when]
    return "; ".join(filter(None, parts))


def _columns(paired: Paired) -> list[Column]:
    def varied(key: str) -> Column:
        return Column(
            key=key,
            head=clean(key.partition(".")[2] or key),
            text=lambda values: cell(look_up(values, key)),
            priority=0,
            is_number=all(isinstance(look_up(pair.before.values, key), int | float) for pair in paired.pairs),
        )

    def plain(key: str, head: str, priority: int, write: Callable[[Any], str], is_number: bool = True) -> Column:
        return Column(key=key, head=head, text=lambda v: write(v[key]), priority=priority, is_number=is_number)

    columns = [
        *map(varied, paired.varied),
        plain("strategy", "strategy", 0, str, False),
        plain("peak_allocated_bytes_a", "A peak MiB", 5, format_mib),
        plain("peak_allocated_bytes_b", "B peak MiB", 5, format_mib),
        plain("peak_change", "peak", 1, str),
        plain("step_s_median_a", "A step ms", 6, format_ms),
        plain("step_s_median_b", "B step ms", 6, format_ms),
        plain("step_change", "step", 1, str),
        plain("step_interval", "step interval", 3, str),
        plain("rounds", "rounds", 7, str),
        plain("verdict", "verdict", 1, VERDICTS.__getitem__, False),
    ]
    is_judged = paired.thresholds or any(pair.verdict != "not asked" for pair in paired.pairs)
    return columns if is_judged else columns[:-1]


def _values(pair: Pair) -> dict[str, Any]:
    rounds = f"{len(pair.before.rounds)}+{len(pair.after.rounds)}"
    texts = {"peak_change": _change(pair.peak_ratio), "step_change": _change(pair.step_ratio)}
    place = {"device_name": pair.before.values["device_name"]}
    return {**pair_json(pair), **place, **texts, "step_interval": _interval(pair), "rounds": rounds}


def _failures(paired: Paired) -> list[str]:
    lines = []
    for pair in paired.pairs:
        sides = []
        for letter, row in (("A", pair.before), ("B", pair.after)):
            where = f" in {row.values['failed_phase']}" if row.values["failed_phase"] and not row.is_ok else ""
            why = f" ({row.values['message'][:300]})" if row.values["message"] and not row.is_ok else ""
            sides.append(f"{row.values['status']}{where} in {letter}{why}")
        if not pair.is_ok:
            lines.append(f"{paired.name(pair.before)}: {', '.join(sides)}")
    return lines


def notes(paired: Paired) -> list[str]:
    """List what a reader must know beside the figures: what else differs, and what to do about the undecided."""
    lines = differences(paired)
    for letter, n_older in zip("AB", paired.n_older, strict=True):
        if n_older:
            lines.append(
                f"{letter} holds {n_older} older rows of the same configurations (another version, seed or number of "
                "threads), which are left out"
            )
    bare = [pair for pair in paired.pairs if pair.step_ratio is not None and pair.step_low is None]
    if bare:
        lines.append(
            f"{len(bare)} rows have a single round in A or B, and so no interval of step time; measure with --rounds 3 "
            "or more"
        )
    undecided = {name for pair in paired.pairs for name, word in pair.told.items() if word == "undecided"}
    if "step" in undecided and any(pair.told.get("step") == "undecided" and pair.step_low for pair in paired.pairs):
        lines.append("step time is undecided where its interval holds the threshold; more --rounds make it narrower")
    if any(pair.told.get("step") == "undecided" and pair.step_ratio is None for pair in paired.pairs):
        lines.append("step time is undecided where A or B has no timed step")
    if "peak" in undecided:
        lines.append("peak memory is undecided where A or B does not know it")
    return lines


def pair_json(pair: Pair) -> dict[str, Any]:
    """Give a pair as plain data; ``_a`` and ``_b`` end what belongs to one side."""
    before, after = pair.before.values, pair.after.values
    sides: dict[str, Any] = {}
    for key in ("device_name", "status", "failed_phase", "message", "peak_allocated_bytes", "step_s_median"):
        sides[f"{key}_a"], sides[f"{key}_b"] = before[key], after[key]
    sides["rounds_a"], sides["rounds_b"] = len(pair.before.rounds), len(pair.after.rounds)
    return {
        "strategy": pair.before.label,
        "model": before["model"],
        "train": before["train"],
        **sides,
        "peak_ratio": None if pair.peak_ratio is None else float(pair.peak_ratio),
        "step_ratio": pair.step_ratio,
        "step_ratio_low": pair.step_low,
        "step_ratio_high": pair.step_high,
        "told": pair.told,
        "verdict": pair.verdict,
    }


def as_json(paired: Paired, paths: tuple[Path, Path], skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Give the whole comparison as plain data, ratios B / A."""
    lonely = {
        name: [
            {key: row.values[key] for key in ("strategy", "model", "train", "device_name", "status")} for row in rows
        ]
        for name, rows in (("only_in_a", paired.only_a), ("only_in_b", paired.only_b))
    }
    return {
        "outcome": outcome(paired),
        "summary": summary(paired),
        "a": str(paths[0]),
        "b": str(paths[1]),
        "thresholds": [{"quantity": each.quantity, "above_ratio": float(each.above)} for each in paired.thresholds],
        "confidence_of_all": CONFIDENCE,
        "rows": [pair_json(pair) for pair in paired.pairs],
        **lonely,
        "notes": notes(paired),
        "not_used": [str(skip) for skip in skipped],
    }

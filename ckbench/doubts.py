"""Reasons not to trust a table yet, each with the next thing to do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckbench.compare import Comparison, Row
from ckbench.host import is_busy
from ckbench.units import GIB_BYTES, counted, format_bytes, format_percent, one_line

MANY = 4
ORDER_TOLERANCE = 1.02
FLOPS_GAP = 1.35
CLOCK_SHARE = 0.8
DRIFT = 0.10
DRIFT_P_VALUE = 0.001
ESTIMATE_TOLERANCE = 0.05
STORES_SCORES = ("eager", "math")
"""Ways to compute attention that keep the scores, batch x heads x seq x seq, for backward."""
IDLE_DEVICE_BYTES = GIB_BYTES
"""A GPU that nobody computes on holds less: the driver's own share and a desktop."""


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """One reason, which rows it is about, and what to do."""

    about: str
    reason: str
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.about}: {self.reason}" if self.about else self.reason
        return one_line(f"{text}; {self.advice}" if self.advice else text)


Check = Callable[[Comparison, list[list[Row]]], Iterator[Doubt]]


def doubts(comparison: Comparison) -> list[Doubt]:
    """Give every doubt about a comparison, gravest first."""
    groups: dict[str, list[Row]] = {}
    for row in comparison.rows:
        groups.setdefault(row.group, []).append(row)
    found: list[Doubt] = []
    for check in CHECKS:
        found.extend(check(comparison, list(groups.values())))
    return found


def _names(rows: Sequence[Row], varied: Sequence[str]) -> str:
    """Name rows: by strategy, and by what varies where one strategy stands in several rows."""
    labels = list(dict.fromkeys(row.label for row in rows))
    text = ", ".join(labels[:MANY]) + (f" and {len(labels) - MANY} more" if len(labels) > MANY else "")
    return f"{text} ({len(rows)} rows)" if varied and len(rows) > len(labels) else text


def _gather(
    comparison: Comparison, test: Callable[[Row], bool], reason: Callable[[Sequence[Row]], str], advice: str
) -> Iterator[Doubt]:
    rows = [row for row in comparison.rows if test(row)]
    if rows:
        yield Doubt(about=_names(rows, comparison.varied), reason=reason(rows), advice=advice)


def _mixed(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    for key, name in (("torch", "PyTorch versions"), ("code", "versions of ckbench"), ("threads", "thread counts")):
        seen = {str(r.values["environment"].get(key)) for r in comparison.rows if r.values["environment"]}
        if len(seen) > 1:
            yield Doubt(
                about="",
                reason=f"rows of different {name} ({', '.join(sorted(seen))}) stand in one table",
                advice="ratios are made only between equal ones; measure again for one table",
            )
    allocators = {str(r.values["environment"].get("allocator")) for r in comparison.rows if r.values["environment"]}
    if len(allocators) > 1:
        yield Doubt(
            about="",
            reason="rows of different allocator settings stand in one table",
            advice="do not compare their reserved bytes",
        )


def _baseline(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    fallen = [rows for rows in groups if rows[0].group in comparison.fallback_groups]
    if fallen:
        names = sorted({comparison.baselines[rows[0].group] for rows in fallen})
        yield Doubt(
            about="baseline",
            reason=f"none has no ok row in {len(fallen)} of {len(groups)} groups, so ratios are to {', '.join(names)}",
        )
    yield from _gather(
        comparison,
        lambda row: row.is_across_sessions,
        lambda rows: "the baseline was measured in another session only, so the ratio is of two runs, not of pairs",
        "measure both in one run",
    )
    lone = [rows for rows in groups if rows[0].group not in comparison.baselines]
    if lone:
        yield Doubt(
            about="baseline", reason=f"{counted(len(lone), 'group')} without an ok row, so there are no ratios in them"
        )


def _invalid(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    for row in comparison.rows:
        if row.values["status"] == "invalid":
            yield Doubt(about=row.label, reason=f"does not compute what none computes: {row.values['parity_detail']}")


def _calls(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    def differs(row: Row) -> bool:
        counted, planned = row.values["block_calls_backward"], row.values["block_calls_backward_planned"]
        return counted is not None and planned is not None and counted != planned

    yield from _gather(
        comparison,
        differs,
        lambda rows: (
            f"blocks ran {rows[0].values['block_calls_backward']} times in backward, the plan says "
            f"{rows[0].values['block_calls_backward_planned']}"
        ),
        "the strategy did not do what its name says; report this",
    )


def _order(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    """Compare with the baseline what no strategy may exceed: kept bytes, and speed without recomputation."""
    for rows in groups:
        base = next((r for r in rows if r.label == comparison.baselines.get(rows[0].group)), None)
        if base is None or base.label != "none":
            continue
        for row in rows:
            saved, base_saved = row.values["saved_bytes"], base.values["saved_bytes"]
            if row.is_ok and saved is not None and base_saved and saved > base_saved * ORDER_TOLERANCE:
                yield Doubt(about=row.label, reason=f"keeps more than none ({format_bytes(saved)})")
            high = row.values["slowdown_high"]
            if row.is_ok and row is not base and high is not None and high < 1 and _recomputes(row):
                yield Doubt(
                    about=row.label,
                    reason=f"recomputes and yet is faster than none ({row.values['slowdown_ratio']:.2f} times)",
                    advice="something disturbed the timing; run again with more rounds on a quiet machine",
                )


def _recomputes(row: Row) -> bool:
    return bool(row.values["region_calls_backward"])


def _no_effect(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    def idle(row: Row) -> bool:
        return (
            row.is_ok
            and row.label != "none"
            and bool(row.values["n_regions"])
            and row.values["region_calls_backward"] == 0
        )

    yield from _gather(comparison, idle, lambda rows: "no region was recomputed: the strategy had no effect", "")


def _core(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    """Name rows that recompute the attention core for nothing: a fused kernel keeps no scores that could be dropped."""
    bases = {row.group: row.values["saved_bytes"] for row in comparison.rows if row.is_ok and row.label == "none"}

    def in_vain(row: Row) -> bool:
        regions = (row.values["plan"] or {}).get("regions", ())
        if not row.is_ok or not any(region["part"] == "core" for region in regions):
            return False
        saved, base = row.values["saved_bytes"], bases.get(row.group)
        if saved is None or base is None:
            return row.values["model"].get("attention") not in STORES_SCORES
        return bool(saved * ORDER_TOLERANCE >= base)

    yield from _gather(
        comparison,
        in_vain,
        lambda rows: (
            f"recomputes the attention core with attention: {rows[0].values['model'].get('attention')} "
            "and keeps hardly less for it"
        ),
        "a fused kernel stores no scores; the core pays with attention: eager, or in long sequences",
    )


def _owner(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    """Name peaks that recomputing more could hardly lower: the optimizer's, and the head's with little kept beside."""
    yield from _gather(
        comparison,
        lambda row: row.is_ok and row.label != "none" and row.values["peak_phase"] == "loss" and _head_holds_most(row),
        lambda rows: "the peak belongs to the head and loss, and most of it is theirs",
        "activation strategies cannot lower that; a chunked loss can (train.loss, more train.loss_chunks)",
    )
    yield from _gather(
        comparison,
        lambda row: row.is_ok and row.label != "none" and row.values["peak_phase"] == "optimizer",
        lambda rows: "the peak belongs to the optimizer",
        "activation strategies cannot lower that; choose another optimizer or implementation",
    )


def _head_holds_most(row: Row) -> bool:
    """Tell whether less than half of the activations at a peak in the loss phase is what blocks keep."""
    saved, activations = row.values["saved_bytes"], row.values["activation_peak_bytes"]
    return saved is None or activations is None or saved < activations / 2


def _spread(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    def half(row: Row) -> float | None:
        low, high, middle = (row.values[key] for key in ("step_s_low", "step_s_high", "step_s_median"))
        return None if low is None or high is None or not middle else float((high - low) / 2 / middle)

    def wide(row: Row) -> bool:
        target, width = row.values["run"].get("precision_target"), half(row)
        return isinstance(target, float) and width is not None and width > target

    yield from _gather(
        comparison,
        wide,
        lambda rows: (
            f"step time known to {format_percent(max(half(r) or 0 for r in rows), signed=False)} at worst, "
            f"{format_percent(rows[0].values['run']['precision_target'], signed=False)} was asked"
        ),
        "more rounds (--rounds) or a higher run.max_seconds narrow it",
    )
    yield from _gather(
        comparison,
        lambda row: row.is_ok and row.values["rounds"] == 1,
        lambda rows: "measured in one round, so slowdowns have no interval",
        "use --rounds 5",
    )
    yield from _gather(
        comparison,
        lambda row: bool(row.values["outliers"]),
        lambda rows: f"{counted(sum(r.values['outliers'] for r in rows), 'outlying step')} (kept in the figures)",
        "",
    )


def _drift(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    def drifts(row: Row) -> bool:
        for record in row.records:
            change, chance = record["drift_ratio"], record["drift_p_value"]
            if change is not None and chance is not None and abs(change) > DRIFT and chance < DRIFT_P_VALUE:
                return True
        return False

    yield from _gather(
        comparison,
        drifts,
        lambda rows: f"step time drifted by more than {DRIFT:.0%} within a trial",
        "the machine was warming up, throttled or busy",
    )


def _flops_gap(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    def far(row: Row) -> bool:
        low, flops = row.values["slowdown_low"], row.values["flops_ratio"]
        return row.is_ok and low is not None and flops is not None and low > flops * FLOPS_GAP

    yield from _gather(
        comparison,
        far,
        lambda rows: (
            f"{rows[0].values['slowdown_ratio']:.2f} times the baseline's step where counted work says "
            f"{rows[0].values['flops_ratio']:.2f}"
        ),
        "the excess is not arithmetic: small blocks pay for launching work, random-number state and hooks",
    )


def _warm_up(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    yield from _gather(
        comparison,
        lambda row: (
            row.is_ok
            and isinstance(row.values["run"].get("warmup_steps"), int)
            and row.values["run"]["warmup_steps"] < 3
        ),
        lambda rows: f"only {rows[0].values['run']['warmup_steps']} warm-up steps were asked for",
        "first steps are slower; ask for at least 3",
    )


def _parity_unknown(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    yield from _gather(
        comparison,
        lambda row: row.is_ok and row.values["parity"] in (None, "none"),
        lambda rows: "gradients were not compared with those of none",
        "set run.parity: true",
    )


def _machine(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    loads = []
    for row in comparison.rows:
        for record in row.records:
            if is_busy(record["environment"]):
                loads.append((record["environment"]["load_1min"], record["environment"]["threads"]))
    if loads:
        load, threads = max(loads)
        yield Doubt(
            about="machine",
            reason=f"busy during {counted(len(loads), 'trial')}"
            f" (load up to {load:.1f} on {counted(threads, 'thread')})",
            advice="other work disturbs timing, not memory",
        )
    yield from _gather(
        comparison,
        lambda row: bool(row.values["environment"].get("other_processes")),
        lambda rows: "other processes were on the device",
        "their memory and work disturb NVML figures and timing",
    )
    yield from _gather(
        comparison,
        _is_throttled,
        lambda rows: f"the device was throttled or ran below {CLOCK_SHARE:.0%} of its highest clock",
        "let it cool, or lock its clocks",
    )


def _nvml(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    told = [row.values["environment"].get("nvml_warnings") for row in comparison.rows]
    texts = dict.fromkeys(str(text) for texts in told if isinstance(texts, list) for text in texts)
    yield from (Doubt(about="", reason=text) for text in texts)
    yield from _gather(
        comparison,
        lambda row: (row.values["nvml_device_before_bytes"] or 0) > IDLE_DEVICE_BYTES,
        lambda rows: (
            f"{format_bytes(max(r.values['nvml_device_before_bytes'] for r in rows))} of the device were in use "
            "before the trial"
        ),
        "that is not this run's memory: read the allocator's columns, or what the device grew by",
    )


def _is_throttled(row: Row) -> bool:
    for record in row.records:
        facts: dict[str, Any] = record["environment"]
        clock, highest = facts.get("clock_after_mhz"), facts.get("max_clock_mhz")
        if isinstance(clock, int) and isinstance(highest, int) and clock < CLOCK_SHARE * highest:
            return True
        if facts.get("throttle_reasons_after"):
            return True
    return False


def _allocator(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    yield from _gather(
        comparison,
        lambda row: bool(row.values["allocator_retries"]),
        lambda rows: "the allocator ran short and retried during timed steps",
        "reserved bytes and step time are not those of a roomy device",
    )


def _skipped_updates(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    yield from _gather(
        comparison,
        lambda row: bool(row.values["skipped_optimizer_steps"]),
        lambda rows: f"gradient scaling skipped up to {max(r.values['skipped_optimizer_steps'] for r in rows)} updates",
        "",
    )


def _estimate(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    def off(row: Row) -> bool:
        estimate, peak = row.values["estimate_peak_bytes"], row.values["peak_allocated_bytes"]
        return bool(estimate and peak and abs(estimate / peak - 1) > ESTIMATE_TOLERANCE)

    yield from _gather(comparison, off, lambda rows: "estimated and measured peak differ by more than 5 %", "")


def _notes(comparison: Comparison, groups: list[list[Row]]) -> Iterator[Doubt]:
    notes = dict.fromkeys((row.label, str(note)) for row in comparison.rows for note in row.values["notes"])
    for label, note in notes:
        yield Doubt(about=label, reason=note)


CHECKS: tuple[Check, ...] = (
    _invalid,
    _baseline,
    _mixed,
    _calls,
    _no_effect,
    _order,
    _core,
    _owner,
    _flops_gap,
    _spread,
    _drift,
    _warm_up,
    _parity_unknown,
    _machine,
    _nvml,
    _allocator,
    _skipped_updates,
    _estimate,
    _notes,
)

"""From records to rows: rounds gathered, newest session kept, ratios to a named baseline.

Ratios are made only inside a group: same model and training step, same device by name, same versions,
threads and allocator settings.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckbench.config import digest
from ckbench.errors import ConfigError
from ckbench.records import FIELDS, MEMORY_FIELDS
from ckbench.registry import did_you_mean
from ckbench.statistics import geometric_interval, paired_ratio

SAME_ENVIRONMENT = (
    "torch",
    "code",
    "threads",
    "allocator",
    "allocator_settings",
    "driver",
    "cuda",
    "tf32_matmul",
)
SHORTEST_STEP_S, LONGEST_STEP_S = 1e-9, 1e9
SEVERITY = ("ok", "skipped", "oom", "timeout", "killed", "error", "recompute_mismatch", "invalid")
COUNT_FIELDS = (
    "flops_forward",
    "flops_backward",
    "block_calls_forward",
    "block_calls_backward",
    "region_calls_backward",
    "parity",
    "parity_detail",
    "parity_noise_ratio",
    "peak_reserved_bytes",
    "peak_active_bytes",
    "peak_requested_bytes",
    "nvml_process_bytes",
    "nvml_device_bytes",
)


@dataclass
class Row:
    """One strategy on one configuration: all rounds of one session together."""

    values: dict[str, Any]
    rounds: dict[int, float]
    """Median step seconds of every ok round."""
    group: str
    records: list[dict[str, Any]] = field(repr=False)
    is_across_sessions: bool = False
    """Whether its baseline was measured in another session only."""

    @property
    def is_ok(self) -> bool:
        """Whether the row may take part in ratios."""
        return bool(self.values["status"] == "ok")

    @property
    def label(self) -> str:
        """The strategy as typed."""
        return str(self.values["strategy"])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows in the order to show them, and what they have in common."""

    rows: list[Row]
    varied: tuple[str, ...]
    """Dotted keys of model and train that differ between rows."""
    baselines: dict[str, str]
    """Baseline strategy by group."""
    fallback_groups: frozenset[str]
    """Groups whose baseline is not the one asked for, because that one did not end ok."""


def check_baseline(records: Sequence[dict[str, Any]], baseline: str | None) -> None:
    """Refuse a baseline that no record has. Raises ConfigError."""
    if baseline is not None and all(record["strategy"] != baseline for record in records):
        known = dict.fromkeys(record["strategy"] for record in records)
        raise ConfigError(f"no record has the strategy {baseline!r}{did_you_mean(baseline, known)}")


def compare(
    records: Iterable[dict[str, Any]], *, all_sessions: bool = False, baseline: str | None = None
) -> Comparison:
    """Gather records into rows with ratios. ``baseline`` is a strategy label; none where it is left out."""
    records = list(records)
    rows = gather(records, all_sessions=all_sessions)
    earlier = {} if all_sessions else _by_session(records)
    baselines, fallbacks = {}, set()
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row.group, []).append(row)
    for group, members in by_group.items():
        base, is_fallback = choose_baseline(members, baseline or "none")
        if base is None:
            continue
        baselines[group] = base.label
        if is_fallback:
            fallbacks.add(group)
        for row in members:
            own = earlier.get((group, base.label, row.values["session_id"]), base)
            _relate(row, own if own.is_ok and row is not base else base)
    varied = varied_keys(rows)
    rows.sort(key=lambda row: (*(sort_key(row.values, key) for key in varied), row.values["order"]))
    return Comparison(rows=rows, varied=varied, baselines=baselines, fallback_groups=frozenset(fallbacks))


def _by_session(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], Row]:
    """Give the row of every strategy in every session, by group, strategy and session."""
    members: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    if len({record["session_id"] for record in records}) < 2:
        return {}
    for record in records:
        members.setdefault((group_id(record), record["strategy"], record["session_id"]), []).append(record)
    return {key: _row(key[0], found) for key, found in members.items()}


def gather(records: Iterable[dict[str, Any]], *, all_sessions: bool) -> list[Row]:
    """Put the rounds of each configuration together; keep its newest session unless all are wanted."""
    gathered: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        key = (group_id(record), record["strategy"])
        gathered.setdefault(key, {}).setdefault(record["session_id"], []).append(record)
    rows = []
    for (group, _), sessions in gathered.items():
        newest_first = sorted(sessions.values(), key=lambda rs: max(r["started_at"] for r in rs), reverse=True)
        for members in newest_first if all_sessions else newest_first[:1]:
            suffix = members[0]["session_id"] if all_sessions else ""
            rows.append(_row(f"{group}{suffix}", members))
    return rows


def group_id(record: dict[str, Any]) -> str:
    """Name what must be equal for a ratio to mean something."""
    environment = record["environment"]
    return digest(
        [
            record["model"],
            record["train"],
            record["run"].get("seed"),
            record["device_name"] or record["device"],
            [environment.get(key) for key in SAME_ENVIRONMENT] if environment else None,
        ]
    )


def _row(group: str, members: list[dict[str, Any]]) -> Row:
    newest: dict[int, dict[str, Any]] = {}
    for record in sorted(members, key=lambda r: r["started_at"]):
        newest[record["round"]] = record  # a trial tried again after a failure replaces it
    ordered = [newest[number] for number in sorted(newest)]
    first = ordered[0]
    values = dict(first)
    worst = max(ordered, key=lambda r: SEVERITY.index(r["status"]))
    for key in ("status", "message", "failed_phase", "signal"):
        values[key] = worst[key]
    for key in (*MEMORY_FIELDS, *COUNT_FIELDS):
        values[key] = next((r[key] for r in ordered if r[key] is not None), None)
    values["parity"] = values["parity"] or "none"  # a trial that ended early was not checked
    rounds = {r["round"]: r["step_s_median"] for r in ordered if r["status"] == "ok" and _is_time(r["step_s_median"])}
    values.update(_times(ordered, rounds))
    values["rounds"] = len(rounds)
    used, before = values["nvml_device_bytes"], values["nvml_device_before_bytes"]
    values["nvml_device_grown_bytes"] = None if used is None or before is None else used - before
    return Row(values=values, rounds=rounds, group=group, records=ordered)


def _is_time(seconds: float | None) -> bool:
    """Tell whether a step can have taken that long; the bounds keep ratios of foreign records finite."""
    return seconds is not None and SHORTEST_STEP_S <= seconds <= LONGEST_STEP_S


def _times(ordered: Sequence[dict[str, Any]], rounds: dict[int, float]) -> dict[str, Any]:
    """Pool time over rounds: geometric mean of the rounds' medians, interval by Student's t on logarithms.

    One round keeps the interval of its own median.
    """
    timed = [r for r in ordered if r["round"] in rounds]
    if not timed:
        return dict.fromkeys(("step_s_median", "step_s_low", "step_s_high", "samples", "tokens_per_s"))
    pooled: dict[str, Any] = {
        "samples": sum(r["samples"] or 0 for r in timed),
        "outliers": sum(r["outliers"] or 0 for r in timed),
        "step_samples_s": [sample for r in timed for sample in r["step_samples_s"]],
    }
    for key in ("forward_s", "backward_s", "optimizer_s"):
        known = [r[key] for r in timed if r[key] is not None]
        pooled[key] = statistics.median(known) if known else None
    centre, low, high = geometric_interval(list(rounds.values()), first_stage(timed[0]["run"], list(rounds)))
    if low is None or high is None:
        low, high = timed[0]["step_s_low"], timed[0]["step_s_high"]
    pooled["step_s_median"], pooled["step_s_low"], pooled["step_s_high"] = centre, low, high
    tokens = tokens_per_step(timed[0]["train"])
    pooled["tokens_per_s"] = tokens / centre if tokens else None
    return pooled


def first_stage(run: dict[str, Any], rounds: Sequence[int]) -> int | None:
    """Count the rounds after which it was decided whether to add more; None where none could be added."""
    asked, most = run.get("rounds"), run.get("max_rounds")
    if type(asked) is not int or type(most) is not int or most <= asked:
        return None
    return sum(1 for number in rounds if number < asked)


def tokens_per_step(train: dict[str, Any]) -> int | None:
    """Count the tokens behind one optimizer step."""
    factors = [train.get(key, 1) for key in ("batch_size", "seq_len", "grad_accumulation")]
    return math.prod(factors) if all(type(f) is int for f in factors) else None


def choose_baseline(members: Sequence[Row], wanted: str) -> tuple[Row | None, bool]:
    """Give the wanted strategy where it ended ok, else the ok row that keeps most, and whether it is that."""
    for row in members:
        if row.label == wanted and row.is_ok:
            return row, False
    usable = [row for row in members if row.is_ok]
    if not usable:
        return None, False
    return max(usable, key=lambda row: row.values["saved_bytes"] or 0), True


def _relate(row: Row, base: Row) -> None:
    """Fill what compares a row with its baseline; a row that is not ok gets no ratio."""
    values = row.values
    values["baseline"] = base.label
    values["peak_change_ratio"] = None
    for key in ("slowdown_ratio", "slowdown_low", "slowdown_high", "flops_ratio"):
        values[key] = None
    if not row.is_ok:
        return
    peak, base_peak = values["peak_allocated_bytes"], base.values["peak_allocated_bytes"]
    if peak is not None and base_peak:
        values["peak_change_ratio"] = peak / base_peak - 1
    flops, base_flops = total_flops(values), total_flops(base.values)
    if flops is not None and base_flops:
        values["flops_ratio"] = flops / base_flops
    if row is base:
        values["slowdown_ratio"] = values["slowdown_low"] = values["slowdown_high"] = 1.0 if row.rounds else None
        return
    paired = sorted(set(row.rounds) & set(base.rounds))
    if not paired:
        return
    n_first = first_stage(row.values["run"], paired)
    ratio = paired_ratio([row.rounds[i] for i in paired], [base.rounds[i] for i in paired], n_first)
    if row.values["session_id"] != base.values["session_id"]:
        row.is_across_sessions = True
        ratio = (ratio[0], None, None)  # rounds of different sessions did not alternate
    values["slowdown_ratio"], values["slowdown_low"], values["slowdown_high"] = ratio


def total_flops(values: dict[str, Any]) -> int | None:
    """Add forward and backward; None where either is unknown."""
    forward, backward = values["flops_forward"], values["flops_backward"]
    return None if forward is None or backward is None else int(forward + backward)


def varied_keys(rows: Sequence[Row]) -> tuple[str, ...]:
    """List the dotted keys of model and train, and device name, that differ between rows."""
    keys = []
    for section in ("model", "train"):
        names = dict.fromkeys(name for row in rows for name in flat_names(row.values[section]))
        for name in names:
            seen = {json.dumps(look_up(row.values, f"{section}.{name}"), sort_keys=True) for row in rows}
            if len(seen) > 1:
                keys.append(f"{section}.{name}")
    if len({row.values["device_name"] for row in rows}) > 1:
        keys.append("device_name")
    return tuple(keys)


def flat_names(section: dict[str, Any]) -> list[str]:
    """List a section's keys, and for a mapping those inside it: ``args.depth``."""
    names = []
    for name, value in section.items():
        names += [f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [name]
    return names


def look_up(values: dict[str, Any], dotted: str) -> Any:
    """Give a value by its dotted key; ``model.args.depth`` reaches into a mapping."""
    section, dot, name = dotted.partition(".")
    if not dot:
        return values.get(dotted)
    outer, dot, inner = name.partition(".")
    mapping = values[section].get(outer)
    if dot and name not in values[section]:
        return mapping.get(inner) if isinstance(mapping, dict) else None
    return values[section].get(name)


def sort_key(values: dict[str, Any], dotted: str) -> tuple[int, float, str]:
    """Order numbers as numbers, then everything else as text."""
    value = look_up(values, dotted)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (0, float(value), "")
    return (1, 0.0, str(value))


def row_json(row: Row) -> dict[str, Any]:
    """Give a row as plain data: every record field, the pooled ones and the relative ones."""
    extra = ("rounds", "baseline", "peak_change_ratio", "nvml_device_grown_bytes")
    return {key: row.values.get(key) for key in (*FIELDS, *extra)}

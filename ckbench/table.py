"""The comparison as a table: typed columns with a unit, a header that states the conditions, the doubts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckbench.compare import Comparison, Row, look_up, tokens_per_step
from ckbench.doubts import Doubt, doubts
from ckbench.store import Skipped
from ckbench.units import UNKNOWN, clean, format_count, format_mib, format_ms, format_percent, one_line

HEADER_KEYS = {
    "model": (
        *("family", "arch", "path", "build", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size"),
        *("image_size", "patch_size", "dropout", "attention", "config", "args", "batch", "loss"),
    ),
    "train": ("batch_size", "seq_len", "precision", "optimizer", "grad_accumulation", "loss"),
}
PARITY_MARKS = {
    "exact": "exact",
    "within_noise": "noise",
    "within_tolerance": "close",
    "failed": "FAILED",
    "none": UNKNOWN,
    None: UNKNOWN,
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its head with the unit, how to write a cell, and how soon it gives way when space is short."""

    key: str
    head: str
    text: Callable[[dict[str, Any]], str]
    priority: int
    is_number: bool = True


@dataclass(frozen=True, kw_only=True)
class Table:
    """What every report format draws."""

    header: list[str]
    columns: list[Column]
    rows: list[Row]
    failures: list[str]
    doubts: list[Doubt]
    skipped: list[Skipped]

    def cells(self, columns: list[Column] | None = None) -> list[list[str]]:
        """Write every cell of the asked columns as text; nothing from a foreign file steers the terminal."""
        return [[clean(column.text(row.values)) for column in columns or self.columns] for row in self.rows]


def build(comparison: Comparison, *, skipped: list[Skipped] | None = None) -> Table:
    """Lay out a comparison."""
    shown = _columns(comparison)
    return Table(
        header=[clean(line) for line in header(comparison)],
        columns=shown,
        rows=comparison.rows,
        failures=[one_line(line) for line in failures(comparison)],
        doubts=doubts(comparison),
        skipped=skipped or [],
    )


def _columns(comparison: Comparison) -> list[Column]:
    varied = [
        Column(
            key=key,
            head=clean(key.partition(".")[2] or key),
            text=lambda values, key=key: cell(look_up(values, key)),  # type: ignore[misc]
            priority=0,
            is_number=_is_numeric(comparison.rows, key),
        )
        for key in comparison.varied
    ]
    known = {key for row in comparison.rows for key, value in row.values.items() if value is not None}
    if "estimate_peak_bytes" in known:
        known.add("estimate_error")
    return varied + [column for column in COLUMNS if column.key in known or column.priority <= ALWAYS]


def _is_numeric(rows: list[Row], key: str) -> bool:
    return all(isinstance(look_up(row.values, key), int | float) for row in rows)


def cell(value: Any) -> str:
    """Write a config value."""
    if value is None:
        return UNKNOWN
    if isinstance(value, list):
        return " ".join(cell(item) for item in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={cell(item)}" for key, item in value.items())
    return str(value)


def _interval(low: float | None, high: float | None, write: Callable[[float | None], str]) -> str:
    return UNKNOWN if low is None or high is None else f"{write(low)}..{write(high)}"


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _is_base(values: dict[str, Any]) -> bool:
    return bool(values.get("baseline") == values["strategy"])


def _peak_change(values: dict[str, Any]) -> str:
    return "base" if _is_base(values) else format_percent(values.get("peak_change_ratio"))


def _estimate_error(values: dict[str, Any]) -> str:
    estimate, peak = values["estimate_peak_bytes"], values["peak_allocated_bytes"]
    return format_percent(estimate / peak - 1) if estimate is not None and peak else UNKNOWN


def _strategy(values: dict[str, Any]) -> str:
    alias = values.get("alias_of")
    return str(values["strategy"]) + (f" (= {alias})" if alias else "")


def _calls(values: dict[str, Any]) -> str:
    forward, backward = values["block_calls_forward"], values["block_calls_backward"]
    return UNKNOWN if forward is None or backward is None else f"{forward}+{backward}"


ALWAYS = 5
COLUMNS = [
    Column(key="strategy", head="strategy", text=_strategy, priority=0, is_number=False),
    Column(
        key="peak_allocated_bytes", head="peak MiB", text=lambda v: format_mib(v["peak_allocated_bytes"]), priority=1
    ),
    Column(key="peak_phase", head="owner", text=lambda v: v["peak_phase"] or UNKNOWN, priority=5, is_number=False),
    Column(key="peak_change_ratio", head="change", text=_peak_change, priority=3),
    Column(
        key="activation_peak_bytes", head="act. MiB", text=lambda v: format_mib(v["activation_peak_bytes"]), priority=9
    ),
    Column(key="saved_bytes", head="saved MiB", text=lambda v: format_mib(v["saved_bytes"]), priority=8),
    Column(
        key="peak_reserved_bytes", head="reserved MiB", text=lambda v: format_mib(v["peak_reserved_bytes"]), priority=10
    ),
    Column(
        key="nvml_process_bytes",
        head="NVML process MiB",
        text=lambda v: format_mib(v["nvml_process_bytes"]),
        priority=11,
    ),
    Column(
        key="nvml_device_bytes", head="NVML device MiB", text=lambda v: format_mib(v["nvml_device_bytes"]), priority=15
    ),
    Column(
        key="nvml_device_grown_bytes",
        head="NVML grown MiB",
        text=lambda v: format_mib(v.get("nvml_device_grown_bytes")),
        priority=16,
    ),
    Column(
        key="estimate_peak_bytes", head="est. MiB", text=lambda v: format_mib(v["estimate_peak_bytes"]), priority=11
    ),
    Column(key="estimate_error", head="est. error", text=_estimate_error, priority=12),
    Column(key="step_s_median", head="step ms", text=lambda v: format_ms(v["step_s_median"]), priority=2),
    Column(
        key="step_s_low",
        head="step 95 %",
        text=lambda v: _interval(v["step_s_low"], v["step_s_high"], format_ms),
        priority=12,
    ),
    Column(key="slowdown_ratio", head="slower", text=lambda v: _ratio(v["slowdown_ratio"]), priority=2),
    Column(
        key="slowdown_low",
        head="slower 95 %",
        text=lambda v: "base" if _is_base(v) else _interval(v["slowdown_low"], v["slowdown_high"], _ratio),
        priority=6,
    ),
    Column(key="tokens_per_s", head="tokens/s", text=lambda v: format_count(v["tokens_per_s"]), priority=13),
    Column(key="flops_ratio", head="FLOPs", text=lambda v: _ratio(v["flops_ratio"]), priority=7),
    Column(key="block_calls_backward", head="calls", text=_calls, priority=14),
    Column(
        key="parity", head="parity", text=lambda v: PARITY_MARKS.get(v["parity"], UNKNOWN), priority=4, is_number=False
    ),
    Column(key="status", head="status", text=lambda v: v["status"], priority=1, is_number=False),
]


def header(comparison: Comparison) -> list[str]:
    """State what all rows share: model, parameters, training step, device, versions, baseline."""
    if not comparison.rows:
        return ["no records"]
    rows = [row.values for row in comparison.rows]
    lines = [f"study {' + '.join(dict.fromkeys(v['study'] for v in rows))}"]
    for section, keys in HEADER_KEYS.items():
        shared = {key: _without_varied(section, key, rows[0], comparison.varied) for key in keys}
        parts = [f"{key} {cell(value)}" for key, value in shared.items() if value is not None and value != {}]
        lines.append(f"{section}: {', '.join(parts) or 'differs between rows'}")
    parameters = sorted({v["n_parameters"] for v in rows if v["n_parameters"] is not None})
    if parameters:
        span = [format_count(parameters[0])] + ([format_count(parameters[-1])] if len(parameters) > 1 else [])
        lines[1] += f"; {' to '.join(span)} parameters"
    tokens = {tokens_per_step(v["train"]) for v in rows}
    if len(tokens) == 1 and None not in tokens and rows[0]["train"].get("grad_accumulation", 1) != 1:
        lines[2] += f"; {tokens.pop()} tokens per step"
    lines += dict.fromkeys(str(note) for v in rows for note in v["study_notes"])
    lines.append(_device_line(rows))
    names = sorted(set(comparison.baselines.values()))
    if names:
        lines.append(f"baseline: {', '.join(names)}; {_settings(rows)}")
    return lines


def _without_varied(section: str, key: str, values: dict[str, Any], varied: tuple[str, ...]) -> Any:
    """Give a config value as far as all rows share it: None where it varies, a mapping without what varies in it."""
    dotted, value = f"{section}.{key}", values[section].get(key)
    if isinstance(value, dict):
        return {inner: item for inner, item in value.items() if f"{dotted}.{inner}" not in varied}
    return None if dotted in varied else value


def _device_line(rows: list[dict[str, Any]]) -> str:
    devices = dict.fromkeys(v["device_name"] or v["device"] for v in rows)
    told = []
    for name in ("torch", "ckbench", "threads"):
        values = dict.fromkeys(cell(v["environment"][name]) for v in rows if v["environment"].get(name) is not None)
        if values:
            told.append(f"{name} {' and '.join(values)}")
    versions = ", ".join(told)
    dates = sorted(v["started_at"][:10] for v in rows if v["started_at"])
    when = "" if not dates else dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return "device: " + "; ".join(part for part in (", ".join(devices), versions, when) if part)


def _settings(rows: list[dict[str, Any]]) -> str:
    rounds = sorted({v["rounds"] for v in rows if v.get("rounds")})
    samples = [v["samples"] for v in rows if v["samples"]]
    if not rounds or not samples:
        return "no timed steps"
    span = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    counts = f"{min(samples)}" if min(samples) == max(samples) else f"{min(samples)} to {max(samples)}"
    return f"{span} {'round' if span == '1' else 'rounds'} of fresh processes, {counts} timed steps per row"


def failures(comparison: Comparison) -> list[str]:
    """Say of every row that did not end ok what happened."""
    lines = []
    for row in comparison.rows:
        values = row.values
        if row.is_ok:
            continue
        where = f" in {values['failed_phase']}" if values["failed_phase"] else ""
        place = ", ".join(f"{key.partition('.')[2] or key} {cell(look_up(values, key))}" for key in comparison.varied)
        message = values["message"] or ""
        lines.append(f"{row.label}{f' ({place})' if place else ''}: {values['status']}{where}: {message[:300]}")
    return lines

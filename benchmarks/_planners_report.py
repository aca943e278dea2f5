"""Tables, rules and plots of ``planners.py``, from its plain data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _plot
from _planners_rivals import METHODS

MIB_BYTES = 2**20
NOISE = 0.02
COMPILED = "compile-budget"
COLUMNS = {**METHODS, COMPILED: "compile budget*"}
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#d55e00", "#999999")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def text(data: dict[str, Any]) -> str:
    """Lay one model's table out for a terminal."""
    rows = [_head(data), *_rows(data)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["", data["title"], f"seconds: {data['seconds_from']}"]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, "", *_notes(data)])


def markdown(about: dict[str, Any], found: Sequence[dict[str, Any]]) -> str:
    """Lay everything out as Markdown."""
    lines = [
        f"{about['machine']}, {about['threads']} thread, PyTorch {about['torch']}, Python {about['python']}, "
        f"{about['date']}; {about['rounds']} rounds by the {about['clock']} clock, {about['seconds']} s; "
        f"load {_load(about['load_before'])} before, {_load(about['load_after'])} after.",
    ]
    for data in found:
        head, *rows = [_head(data), *_rows(data)]
        lines += ["", f"### {data['title']}", "", "| " + " | ".join(head) + " |", "|" + " --: |" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        lines += ["", *(f"* {note}" for note in _notes(data))]
    return "\n".join([*lines, "", *summary(found).splitlines()]) + "\n"


BEGIN, END = "<!-- planners: begin -->", "<!-- planners: end -->"


def write_page(page: Path, tables: str, names: Sequence[str]) -> None:
    """Put the tables, and a plot of each model, between the marks of a page. Raises ValueError where it has none."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no {BEGIN} and {END}")
    plots = "\n".join(f"![memory and time of every plan, {name}](plots/planners_{name}.svg)" for name in names)
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{tables}\n{plots}\n{END}{after}", encoding="utf-8")


def verdict(row: dict[str, Any]) -> str:
    """Judge the rule of time: holds up to 2 % slower, slower where the interval lies above 1, open in between."""
    if row["best"] is None:
        return "holds"
    middle, low, _ = row["best"]["over"]
    if middle <= 1 + NOISE:
        return "holds"
    return "open" if low is not None and low <= 1 else "slower"


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Say how both rules stand over all models."""
    rows = [(data, row) for data in found for row in data["budgets"]]
    over = [f"{data['name']} {_mib(row['budget_bytes'])} MiB" for data, row in rows if not row["is_within"]]
    told = {
        wanted: [
            f"{data['name']} {_mib(row['budget_bytes'])} MiB: {row['best']['spec']} by {_interval(row['best']['over'])}"
            for data, row in rows
            if verdict(row) == wanted
        ]
        for wanted in ("open", "slower")
    }
    n_held = len(rows) - sum(map(len, told.values()))
    off = max(abs(row["predicted_ratio"] / row["ratio"][0] - 1) for _, row in rows)
    exact = [arm for data in found for arm in data["arms"] if arm["predicted_peak_bytes"] is not None]
    wrong = [abs(arm["predicted_peak_bytes"] - max(arm["peak_bytes"], arm["first_peak_bytes"])) for arm in exact]
    return "\n".join(
        [
            f"peak within the budget: {len(rows) - len(over)} of {len(rows)}" + _listed(over),
            f"not slower than the best rival whose peak is no higher (2 %): {n_held} of {len(rows)}"
            + _listed(told["slower"])
            + (f"; open, the interval holds 1: {'; '.join(told['open'])}" if told["open"] else ""),
            f"predicted peak against measured: {len(wrong)} plans, largest difference {max(wrong, default=0)} bytes; "
            f"predicted step time of ours: at most {off:.1%} off the measured",
        ]
    )


def _listed(items: Sequence[str]) -> str:
    return "; not " + "; ".join(items) if items else ""


def _head(data: dict[str, Any]) -> list[str]:
    used = [name for name in COLUMNS if _has(data, name)]
    return [
        "budget MiB", "peak of ours", "ours / none", "predicted", *(COLUMNS[name] for name in used),
        "best at our peak", "ours / best",
    ]  # fmt: skip


def _has(data: dict[str, Any], method: str) -> bool:
    return any(name == method for arm in data["arms"] for name, _ in arm["names"])


def _rows(data: dict[str, Any]) -> list[list[str]]:
    rows = []
    for row in data["budgets"]:
        cells = [
            _mib(row["budget_bytes"]),
            _mib(row["peak_bytes"]) + ("" if row["is_within"] else " OVER"),
            _interval(row["ratio"]),
            f"{row['predicted_ratio']:.3f}",
        ]
        for method in COLUMNS:
            if not _has(data, method):
                continue
            if method == COMPILED:
                fitting = [
                    arm["ratio"][0]
                    for arm in data["arms"]
                    if arm["peak_bytes"] <= row["budget_bytes"] and any(name == method for name, _ in arm["names"])
                ]
                cells.append(f"{min(fitting):.3f}" if fitting else "-")
            else:
                rival = row["rivals"].get(method)
                cells.append(f"{rival['ratio']:.3f}" if rival else "-")
        best = row["best"]
        if best is None:
            cells += ["-", "-"]
        else:
            mark = {"holds": "", "open": " open", "slower": " SLOWER"}[verdict(row)]
            cells += [best["spec"], "same plan" if best["is_ours"] else _interval(best["over"]) + mark]
        rows.append(cells)
    return rows


def _notes(data: dict[str, Any]) -> list[str]:
    n = len(data["budgets"])
    notes = [
        f"none peaks at {_mib(data['none_peak_bytes'])} MiB, no plan below {_mib(data['least_peak_bytes'])} MiB. Step "
        "times are over that of none, medians with 95 % intervals; a rival's is that of the fastest of its plans whose "
        "measured peak is within the budget, - where it has none."
    ]
    for method in dict.fromkeys(item["method"] for item in data["aimed"]):
        aimed = [item for item in data["aimed"] if item["method"] == method]
        over = [
            item["peak_bytes"] - item["budget_bytes"] for item in aimed if item["peak_bytes"] > item["budget_bytes"]
        ]
        told = f", by up to {max(over) / MIB_BYTES:.1f} MiB" if over else ""
        given = f"a plan for {len(aimed)} of {n}, {len(over)} of them over it{told}"
        notes.append(f"{METHODS[method]}, asked for these budgets: {given}.")
    if data["compiled_over_none"] is not None:
        notes.append(
            "*torch.compile's activation memory budget: over none with compiled blocks, which itself takes "
            f"{_interval(data['compiled_over_none'])} of none's step time."
        )
    for row in data["budgets"]:
        best = row["best"]
        if verdict(row) == "holds":
            continue
        expected = "unknown" if best["predicted_ratio"] is None else row["predicted_ratio"] / best["predicted_ratio"]
        told = "wins" if verdict(row) == "slower" else "may win, the interval holds 1"
        notes.append(
            f"At {_mib(row['budget_bytes'])} MiB {best['spec']} {told}: ours takes {_interval(best['over'])} of its "
            f"time, where the planner expected {expected if isinstance(expected, str) else format(expected, '.3f')}."
        )
    proven = sum(row["proven_optimal"] for row in data["budgets"])
    return [*notes, f"Proven optimal by the solver: {proven} of {n}."]


def _interval(values: Sequence[float | None]) -> str:
    middle, low, high = values
    return f"{middle:.3f}" if low is None or high is None else f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB_BYTES:.1f}"


def _load(values: Sequence[float]) -> str:
    return str(values[0]) if values else "unknown"


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw measured peak against measured step time of every plan, and ours as a line."""
    figure, axes = _plot._figure(data["title"])
    for (method, label), colour, mark in zip(COLUMNS.items(), COLOURS[1:], MARKS[1:], strict=False):
        arms = [arm for arm in data["arms"] if any(name == method for name, _ in arm["names"])]
        if arms:
            x, y = [arm["peak_bytes"] / MIB_BYTES for arm in arms], [arm["ratio"][0] for arm in arms]
            axes.plot(x, y, mark, color=colour, label=label, markersize=5, alpha=0.8, linestyle="none")
    rows = sorted(data["budgets"], key=lambda row: row["peak_bytes"])
    x = [*(row["peak_bytes"] / MIB_BYTES for row in rows), data["none_peak_bytes"] / MIB_BYTES]
    axes.plot(x, [*(row["ratio"][0] for row in rows), 1.0], MARKS[0] + "-", color=COLOURS[0], label="ckbench")
    axes.set_xlabel("measured peak, MiB")
    axes.set_ylabel("step time / none")
    axes.legend(fontsize=7, frameon=False, loc="upper right")
    _plot._save(figure, path)

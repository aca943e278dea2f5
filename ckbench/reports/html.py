"""html: one self-contained page with verdicts, interactive charts, the table and the doubts; needs plotly.

The page works from a file and asks no network for anything: its content security policy forbids it, and lets no script
run but the two that are written here.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckbench.compare import Row
from ckbench.errors import ConfigError
from ckbench.reports import _page_figures as figures
from ckbench.reports import _page_sections as sections
from ckbench.reports._page_depth import Depths, depths
from ckbench.reports._page_text import ascii_script, in_script, marked, safe
from ckbench.reports._page_timeline import timeline
from ckbench.reports._pareto import name_of_group
from ckbench.reports._verdicts import verdicts
from ckbench.reports.base import FileReport, Findings
from ckbench.units import clean

NAME = "report.html"
ASSETS = Path(__file__).with_name("_page")
CHARTS = (
    (
        "pareto",
        "Memory against time",
        "Lower left is better. The dotted line joins the rows that nothing beats in both; dimmed rows are beaten "
        "beyond doubt, open signs perhaps. Whiskers: 95 % interval of the step time (peaks are exact); they may leave "
        "the chart. Rest on a point for its row.",
    ),
    (
        "phases",
        "Peak by phase",
        "How high each phase of a step reaches. Parameters, buffers and optimizer state lie at the bottom of every "
        "bar. A triangle marks the phase that owns the peak: only lowering that one lowers the peak.",
    ),
    (
        "categories",
        "What is in memory at the peak",
        "Stacked at the one instant of the peak. Kept for backward is what was held at the turn from forward to "
        "backward, at most: some of it may be gone by then.",
    ),
    ("times", "Step times", "Every timed step of every round. Boxes: quartiles and median; no outlier is dropped."),
    (
        "timeline",
        "Live bytes over one step",
        "The steady step that was weighed; a sign marks each peak. Every phase is drawn equally wide under all "
        "strategies, its allocations and frees at equal distances: the horizontal axis is no time. Choose strategies "
        "in the legend.",
    ),
)
CPU_NOTE = (
    "These bytes were counted on a CPU. Tensors are as large on a card, but its kernels need other temporaries and its "
    "context some hundred MiB: ask `ckbench estimate` before relying on a card's name here."
)


def files(findings: Findings) -> dict[str, bytes]:
    """Give the page. Raises ConfigError where plotly is not installed."""
    return {NAME: page(findings, plotly_js()).encode("ascii", "xmlcharrefreplace")}


def plotly_js() -> str:
    """Give the library's source as its Python package brings it along."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError('--format html needs plotly: pip install "ckbench[report]"') from None
    return str(get_plotlyjs())


def page(findings: Findings, library: str) -> str:
    """Write the page, with the source of plotly in it."""
    comparison = findings.comparison
    groups: dict[str, list[Row]] = {}
    for row in comparison.rows:
        groups.setdefault(row.group, []).append(row)
    looks = {label: i for i, label in enumerate(dict.fromkeys(clean(row.label) for row in comparison.rows))}
    names = [clean(name_of_group(rows[0].values, comparison.varied)) for rows in groups.values()]
    swept = depths(comparison.rows, comparison.varied, looks)
    drawn = [_figures(rows, looks, findings) for rows in groups.values()]
    data = {"groups": drawn, "depths": [each.figure for each in swept]}
    style = (ASSETS / "page.css").read_text(encoding="ascii")
    scripts = [ascii_script(library), (ASSETS / "page.js").read_text(encoding="ascii").replace("\r\n", "\n")]
    title = f"ckbench: {safe(' + '.join(dict.fromkeys(row.values['study'] for row in comparison.rows)))}"
    body = [
        _head(findings, title, names),
        _verdicts(groups, names, findings),
        *(_chart(key, name, told) for key, name, told in CHARTS[:1] if any(key in each for each in drawn)),
        _depths(swept),
        *(_chart(key, name, told) for key, name, told in CHARTS[1:] if any(key in each for each in drawn)),
        _table(findings, {group: i for i, group in enumerate(groups)}),
        _section("environment", "Environment", sections.environment(comparison.rows)),
        _doubts(findings),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{title}</title><style>{style}</style></head><body>",
            *body,
            f'<script type="application/json" id="data">{in_script(data)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>",
            "",
        ]
    )


def _policy(scripts: Sequence[str]) -> str:
    """Allow these scripts by their hash, styles and pictures of the page itself, and nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode("ascii")).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _figures(rows: list[Row], looks: figures.Looks, findings: Findings) -> dict[str, Any]:
    made = {
        "pareto": figures.pareto(rows, looks, findings.whole.columns, findings.budgets),
        "phases": figures.phases(rows, looks),
        "categories": figures.categories(rows, looks),
        "times": figures.times(rows, looks),
        "timeline": timeline(rows, looks),
    }
    return {key: figure for key, figure in made.items() if figure is not None}


def _section(key: str, title: str, content: str, told: str = "") -> str:
    note = f'<p class="told">{safe(told)}</p>' if told else ""
    return f'<section id="{key}"><h2>{safe(title)}</h2>{note}{content}</section>'


def _head(findings: Findings, title: str, names: Sequence[str]) -> str:
    lines = "".join(f"<li>{safe(line)}</li>" for line in findings.whole.header[1:])
    chooser = ""
    if len(names) > 1:
        options = "".join(f'<option value="{i}">{safe(name)}</option>' for i, name in enumerate(names))
        chooser = f'<label class="chooser">configuration <select id="group">{options}</select></label>'
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name in (
        ("verdict", "verdict"), ("pareto", "trade-off"), ("depth", "depth"), ("phases", "peaks"), ("times", "times"),
        ("timeline", "timeline"), ("table", "table"), ("environment", "environment"), ("doubts", "doubts"),
    ))  # fmt: skip
    return f"<header><h1>{title}</h1><ul>{lines}</ul></header><nav>{chooser}<div>{links}</div></nav>"


def _verdicts(groups: dict[str, list[Row]], names: Sequence[str], findings: Findings) -> str:
    parts = []
    for i, (rows, name) in enumerate(zip(groups.values(), names, strict=True)):
        title = f"<h3>{safe(name)}</h3>" if name else ""
        parts.append(f'<div data-of="{i}">{title}{sections.verdict_list(verdicts(rows, findings.budgets))}</div>')
    n_doubts = len(findings.whole.doubts)
    if n_doubts:
        reasons = "one reason" if n_doubts == 1 else f"{n_doubts} reasons"
        parts.append(f'<p><a href="#doubts">{reasons} not to trust this yet</a></p>')
    is_cpu = any(row.values["device"] == "cpu" for row in findings.comparison.rows)
    note = f'<p class="told">{marked(CPU_NOTE)}</p>' if is_cpu else ""
    return _section("verdict", "Verdict", "".join(parts) + note)


def _chart(key: str, title: str, told: str) -> str:
    return _section(key, title, f'<div class="chart" data-chart="{key}"></div>', told)


def _depths(swept: Sequence[Depths]) -> str:
    if not swept:
        return ""
    parts = []
    for i, each in enumerate(swept):
        title = ", ".join(part for part in (each.quantity, each.sweep) if part)
        parts.append(
            f"<details{' open' if i == 0 else ''}><summary>{safe(title)}</summary>"
            f'<div class="chart" data-depth="{i}"></div>{sections.laws_table(each.laws)}</details>'
        )
    told = (
        "Points were measured; lines are least squares. Theory expects a + b\u00b7L without recomputation and per "
        "block, and a + b\u00b7\u221aL for \u221aL segments. Parameters, gradients and optimizer state grow with depth "
        "under every strategy; only the whole peak counts them."
    )
    return _section("depth", "Memory against depth", "".join(parts), told)


def _table(findings: Findings, groups: dict[str, int]) -> str:
    filters = (
        '<div class="filters"><label>filter '
        '<input id="filter" type="search" placeholder="words, all must occur"></label>'
        '<label><input id="front" type="checkbox"> only the front</label>'
        '<label class="chosen"><input id="chosen" type="checkbox"> only the chosen configuration</label>'
        '<output id="count"></output></div>'
    )
    told = "Choose a head to sort by it."
    return _section("table", "Table", filters + sections.results_table(findings.whole, groups), told)


def _doubts(findings: Findings) -> str:
    table = findings.whole
    parts = [sections.remarks(table.doubts, "No reason for doubt was found.")]
    if table.failures:
        parts.append(f"<h3>Did not end ok</h3>{sections.remarks(table.failures, '')}")
    if table.skipped:
        parts.append(f"<h3>Not used</h3>{sections.remarks(table.skipped, '')}")
    return _section("doubts", "Doubts", "".join(parts))


PLUGIN = FileReport(files=files)

"""From a results folder to text or files in any format, and to where they are wanted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckbench import output, registry, store, table
from ckbench.cards import room
from ckbench.compare import Comparison, Row, check_baseline, compare, flat_names, look_up, sort_key, varied_keys
from ckbench.errors import CkbenchError, ConfigError
from ckbench.reports.base import Budget, FileReport, Findings, Report
from ckbench.store import Skipped
from ckbench.table import Table
from ckbench.units import clean

Drawn = str | dict[str, bytes]
"""Text, or files by name."""


def report(
    path: Path,
    *,
    format_: str = "console",
    group_by: str | None = None,
    baseline: str | None = None,
    all_sessions: bool = False,
    budgets: Sequence[str] = (),
    charts: bool = True,
    width: int | None = None,
) -> Drawn:
    """Draw what is stored below ``path``. Raises StoreError where there is nothing to show."""
    plugin = registry.load("reports", format_)
    asked = [budget(text) for text in budgets]
    records, skipped = store.read_some(path)
    found = findings(
        records,
        group_by=group_by,
        baseline=baseline,
        all_sessions=all_sessions,
        skipped=skipped,
        budgets=asked,
        charts=charts,
    )
    return plugin.files(found) if isinstance(plugin, FileReport) else str(plugin(found, width=width))


def draw(
    records: list[dict[str, Any]],
    *,
    format_: str = "console",
    group_by: str | None = None,
    baseline: str | None = None,
    charts: bool = True,
    width: int | None = None,
) -> str:
    """Compare records and draw the rows as text; with ``group_by`` one table per value of that key."""
    found = findings(records, group_by=group_by, baseline=baseline, charts=charts)
    return str(text_report(format_)(found, width=width))


def draw_table(table_: Table, *, format_: str = "console", width: int | None = None) -> str:
    """Draw a table that was not made from records."""
    return str(text_report(format_)(Findings.of_table(table_), width=width))


def text_report(format_: str) -> Report:
    """Give a format that is text. Raises ConfigError for one that makes files."""
    plugin = registry.load("reports", format_)
    if isinstance(plugin, FileReport):
        raise ConfigError(
            f"--format {format_} makes files; keep --format console here, then write "
            f"`ckbench report RESULTS --format {format_} --out WHERE`"
        )
    drawn: Report = plugin
    return drawn


def findings(
    records: list[dict[str, Any]],
    *,
    group_by: str | None = None,
    baseline: str | None = None,
    all_sessions: bool = False,
    skipped: list[Skipped] | None = None,
    budgets: Sequence[Budget] = (),
    charts: bool = True,
) -> Findings:
    """Compare records and lay the rows out: what every format draws from."""
    check_baseline(records, baseline)
    comparison = compare(records, all_sessions=all_sessions, baseline=baseline)
    whole = table.build(comparison, skipped=skipped)
    parts = [whole]
    if group_by is not None:
        divided = _split(comparison, group_by)
        parts = [table.build(part, skipped=skipped if i == 0 else None) for i, part in enumerate(divided)]
    return Findings(comparison=comparison, whole=whole, parts=parts, budgets=budgets, charts=charts)


def budget(text: str) -> Budget:
    """Read a budget: a size is taken as it is, of a card a process gets all but its context."""
    try:
        name, n_bytes = room(text)
    except ConfigError as error:
        raise ConfigError(f"--budget: {error}") from None
    return Budget(name=name or text, usable_bytes=n_bytes)


def deliver(drawn: Drawn, *, format_: str, out: Path | None) -> None:
    """Bring a drawn report to standard output, or to ``out``: a file, or a folder for several.

    Raises ConfigError where files have no place to go, and CkbenchError where they cannot be written.
    """
    if out is None:
        if isinstance(drawn, str):
            output.write(drawn)
        elif len(drawn) == 1 and output.width() is None:
            output.write(next(iter(drawn.values())).decode("ascii"))
        else:
            where = next(iter(drawn)) if len(drawn) == 1 else registry.spell(format_)
            raise ConfigError(f"--format {format_} makes no text for a terminal; say where: --out {where}")
        return
    files = {out.name: drawn.encode("utf-8")} if isinstance(drawn, str) else drawn
    alone = len(files) == 1 and not out.is_dir()
    for name, content in files.items():
        path = out if alone else out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise CkbenchError(f"{path}: cannot be written ({error.strerror})") from None
        output.tell(f"{registry.spell(format_)}: {clean(str(path))}")


def _split(comparison: Comparison, key: str) -> list[Comparison]:
    """Cut a comparison by the value of one key."""
    first = comparison.rows[0].values
    keys = (f"{section}.{name}" for section in ("model", "train") for name in flat_names(first[section]))
    known = {*keys, "strategy", "study", "device_name"}
    dotted = key if key in known else next((k for k in sorted(known) if k.partition(".")[2] == key), None)
    if dotted is None:
        raise ConfigError(f"--group-by {key!r}: unknown key{registry.did_you_mean(key, sorted(known))}")
    groups: dict[str, list[Row]] = {}
    for row in comparison.rows:
        groups.setdefault(str(look_up(row.values, dotted)), []).append(row)
    ordered = sorted(groups.values(), key=lambda rows: sort_key(rows[0].values, dotted))
    return [
        Comparison(
            rows=rows,
            varied=varied_keys(rows),
            baselines=comparison.baselines,
            fallback_groups=comparison.fallback_groups,
        )
        for rows in ordered
    ]

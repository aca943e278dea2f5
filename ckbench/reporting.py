"""From a results folder to text in any format."""

from pathlib import Path
from typing import Any

from ckbench import registry, store, table
from ckbench.compare import Comparison, Row, compare, flat_names, look_up, sort_key, varied_keys
from ckbench.errors import ConfigError, StoreError
from ckbench.store import Skipped


def report(
    path: Path,
    *,
    format_: str = "console",
    group_by: str | None = None,
    baseline: str | None = None,
    all_sessions: bool = False,
    width: int | None = None,
) -> str:
    """Draw what is stored below ``path``. Raises StoreError where there is nothing to show."""
    records, skipped = store.read(path)
    if not records:
        hint = f"; passed over: {skipped[0]}" if skipped else "; `ckbench run` makes some"
        raise StoreError(f"{path}: no ckbench records{hint}")
    return draw(
        records,
        format_=format_,
        group_by=group_by,
        baseline=baseline,
        all_sessions=all_sessions,
        skipped=skipped,
        width=width,
    )


def draw(
    records: list[dict[str, Any]],
    *,
    format_: str = "console",
    group_by: str | None = None,
    baseline: str | None = None,
    all_sessions: bool = False,
    skipped: list[Skipped] | None = None,
    width: int | None = None,
) -> str:
    """Compare records and draw the rows; with ``group_by`` one table per value of that key."""
    render = registry.load("reports", format_)
    if baseline is not None and all(record["strategy"] != baseline for record in records):
        known = dict.fromkeys(record["strategy"] for record in records)
        raise ConfigError(f"no record has the strategy {baseline!r}{registry.did_you_mean(baseline, known)}")
    comparison = compare(records, all_sessions=all_sessions, baseline=baseline)
    parts = [comparison] if group_by is None else _split(comparison, group_by)
    if registry.spell(format_) in ("json", "csv") or len(parts) == 1:
        merged = parts[0] if len(parts) == 1 else _join(comparison, parts)
        return str(render(table.build(merged, skipped=skipped), width=width))
    tables = [table.build(part, skipped=skipped if i == 0 else None) for i, part in enumerate(parts)]
    return "\n".join(str(render(each, width=width)) for each in tables)


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


def _join(comparison: Comparison, parts: list[Comparison]) -> Comparison:
    """Keep one list of rows, in the order of the parts, for formats that have no notion of several tables."""
    return Comparison(
        rows=[row for part in parts for row in part.rows],
        varied=comparison.varied,
        baselines=comparison.baselines,
        fallback_groups=comparison.fallback_groups,
    )

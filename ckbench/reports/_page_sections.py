"""The parts of the page that are text: verdicts, laws, the table, environment, and reasons for doubt."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckbench.compare import Row, look_up
from ckbench.reports._laws import Fitted
from ckbench.reports._page_text import marked, safe
from ckbench.reports._pareto import WORDS, standings
from ckbench.reports._verdicts import Verdict
from ckbench.table import Column, Table
from ckbench.units import UNKNOWN, clean

MOST_VALUES = 4
"""Different values of one fact that are listed; of more, the first ones and how many there are."""
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def verdict_list(verdicts: Sequence[Verdict]) -> str:
    """Write one sentence per budget."""
    items = [
        f"<li{' class=asked' if verdict.is_asked else ''}><b>{safe(verdict.budget)}</b> "
        f"<span>{marked(verdict.sentence)}</span></li>"
        for verdict in verdicts
    ]
    return f'<ul class="verdicts">{"".join(items)}</ul>'


def laws_table(laws: Sequence[tuple[str, Fitted]]) -> str:
    """Write the fitted laws of one chart."""
    rows = []
    for strategy, fitted in laws:
        if fitted.law is None:
            rows.append([strategy, UNKNOWN, "too few depths for a law (four are needed)", UNKNOWN])
            continue
        text, _, r_squared = str(fitted.law).rpartition(", R\u00b2 ")
        other = UNKNOWN if fitted.other is None else f"{fitted.other.r_squared:.4f}"
        why = "expected" if fitted.is_expected else "better fit"
        rows.append([strategy, r_squared, f"{text} ({why})", other])
    head = _cells("th", ["strategy", "R\u00b2", "law, L layers", "R\u00b2 of the other law"])
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="laws"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{safe(text)}</{tag}>" for text in texts)


FEW_KEYS = 2


def results_table(table: Table, groups: Mapping[str, int]) -> str:
    """Write every row with every column; each cell carries what it is sorted by."""
    judged = standings(table.rows)
    heads = [("trade-off", False), *((column.head, column.is_number) for column in table.columns)]
    varied = [column.key for column in table.columns if column.key.startswith(("model.", "train."))]
    measured = [column.key for column in table.columns if column.key not in ("strategy", *varied)]
    # One or two keys tell rows apart at a glance; of several studies there are many, and figures come first
    order = ["strategy", *(varied + measured if len(varied) <= FEW_KEYS else measured + varied)]
    places = {column.key: i for i, column in enumerate(table.columns)}
    shown = [places[key] for key in order]
    head = "".join(
        f'<th{" class=number" if is_number else ""} aria-sort="none"><button type="button">{safe(text)}</button></th>'
        for text, is_number in [heads[i + 1] for i in shown[:1]] + [heads[0]] + [heads[i + 1] for i in shown[1:]]
    )
    body = []
    for row, cells, standing in zip(table.rows, table.cells(), judged, strict=True):
        drawn = [_cell(table.columns[i], cells[i], row) for i in shown]
        word = WORDS[standing] if standing else UNKNOWN
        drawn.insert(
            1, f'<td data-sort="{safe(word)}"><span class="mark {standing or "none"}">{safe(word)}</span></td>'
        )
        kind = "" if row.is_ok else " class=failed"
        group = groups.get(row.group, -1)
        body.append(f'<tr{kind} data-group="{group}" data-standing="{standing or ""}">{"".join(drawn)}</tr>')
    return (
        f'<div class="scroll tall"><table id="results"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(column: Column, text: str, row: Row) -> str:
    value = look_up(row.values, column.key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        found = NUMBER.match(text) if column.is_number else None
        value = float(found.group()) if found else text
        if column.is_number and found is None:
            value = ""  # unknown sorts last, whichever way
    tag, kind = (
        ("th scope=row", "") if column.key == "strategy" else ("td", " class=number" if column.is_number else "")
    )
    end = tag.partition(" ")[0]
    return f'<{tag}{kind} data-sort="{safe(value)}">{safe(text)}</{end}>'


def environment(rows: Sequence[Row]) -> str:
    """Write what the trials ran on; where trials differ, the values or their range."""
    facts: dict[str, dict[str, None]] = {}
    numbers: dict[str, list[float]] = {}
    records = [record for row in rows for record in row.records]
    for record in records:
        named = {"device": record["device_name"] or record["device"], **record["environment"]}
        for key, value in named.items():
            facts.setdefault(clean(str(key)), {})[_fact(value)] = None
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers.setdefault(clean(str(key)), []).append(value)
    lines = []
    for key, values in facts.items():
        told = [value for value in values if value]
        if len(told) > 1 and key in numbers:
            text = f"{min(numbers[key]):g} to {max(numbers[key]):g}"
        elif len(told) > MOST_VALUES:
            text = "; ".join([*told[:MOST_VALUES], f"and {len(told) - MOST_VALUES} more"])
        else:
            text = "; ".join(told)
        if text:
            lines.append(f"<dt>{safe(key)}</dt><dd>{safe(text)}</dd>")
    started = sorted(record["started_at"] for record in records if record["started_at"])
    if started:
        lines.append(f"<dt>measured</dt><dd>{safe(started[0][:19])} to {safe(started[-1][:19])} UTC</dd>")
    return f"<dl>{''.join(lines)}</dl>"


def _fact(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return ""
    return clean(value) if isinstance(value, str) else json.dumps(value, sort_keys=True).strip('"')


def remarks(texts: Iterable[object], nothing: str) -> str:
    """Write a list of sentences, or that there is none."""
    items = [f"<li>{safe(text)}</li>" for text in texts]
    return f"<ul>{''.join(items)}</ul>" if items else f"<p>{safe(nothing)}</p>"

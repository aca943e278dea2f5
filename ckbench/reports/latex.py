"""latex: booktabs tables for papers, plain ASCII; what is left out for width, and every doubt, stands in comments."""

import re
from collections.abc import Iterator, Sequence

from ckbench.compare import Row, look_up, varied_keys
from ckbench.reports._pareto import by_group, standings
from ckbench.reports._tex import comment, escape
from ckbench.reports.base import Findings
from ckbench.store import slug
from ckbench.table import Column, Table
from ckbench.units import UNKNOWN, clean

MAX_CHARS = 84
"""As many characters, gaps counted, stay in the text width of a one-column article in its footnote size."""
GAP_CHARS = 2
NEVER_LEFT_OUT = 2
LEAST_NEEDED = 7
"""Columns of less importance are for other formats; md and csv have them all."""
PAGE_ROWS = 55
MIN_FOR_FRONT = 3


def render(findings: Findings, *, width: int | None = None) -> str:
    """Draw one table environment per part."""
    head = [
        comment("made by ckbench; in the preamble: \\usepackage{booktabs}"),
        comment("every column: ckbench report RESULTS --format md, or csv"),
    ]
    numbered = [f"-{i + 1}" if len(findings.parts) > 1 else "" for i in range(len(findings.parts))]
    tables = ["\n".join(_table(part, number)) for part, number in zip(findings.parts, numbered, strict=True)]
    return "\n".join([*head, "", "\n\n".join(tables), ""])


def _table(table: Table, number: str) -> Iterator[str]:
    shown, shared, left_out = _columns(table)
    notes = _notes(table)
    for title, texts in (
        ("note", notes),
        ("left out for width", [", ".join(column.head for column in left_out)] if left_out else []),
        ("did not end ok", table.failures),
        ("doubt, to be settled before this is printed", [str(doubt) for doubt in table.doubts]),
        ("not used", [str(skip) for skip in table.skipped]),
    ):
        yield from (comment(f"{title}: {text}") for text in texts)
    if len(table.rows) > PAGE_ROWS:
        yield comment(f"{len(table.rows)} rows are more than a page holds: divide them with --group-by")
    bold = _on_front(table.rows)
    yield from (
        r"\begin{table}[htbp]",
        r"  \centering",
        rf"  \caption{{{_caption(table, notes, shared, any(bold))}}}",
        rf"  \label{{tab:ckbench-{_label(table)}{number}}}",
    )
    if shown:
        yield from _tabular(table, shown, bold)
    yield r"\end{table}"


def _tabular(table: Table, shown: list[Column], bold: list[bool]) -> Iterator[str]:
    yield from (r"  \footnotesize", r"  \setlength{\tabcolsep}{4pt}")
    yield rf"  \begin{{tabular}}{{@{{}}{''.join('r' if column.is_number else 'l' for column in shown)}@{{}}}}"
    yield r"    \toprule"
    yield _line([escape(column.head) for column in shown])
    yield r"    \midrule"
    places = [_place(row, varied_keys(table.rows)) for row in table.rows]
    for i, cells in enumerate(table.cells(shown)):
        if i and places[i] != places[i - 1]:
            yield r"    \addlinespace"
        yield _line([_cell(column, text, bold[i]) for column, text in zip(shown, cells, strict=True)])
    yield r"    \bottomrule"
    yield r"  \end{tabular}"


def _columns(table: Table) -> tuple[list[Column], list[tuple[Column, str]], list[Column]]:
    """Choose columns: those shown, those that say the same in every row, those left out."""
    shown, shared, left_out = [], [], []
    cells = {column.key: [cells[0] for cells in table.cells([column])] for column in table.columns}
    for column in table.columns:
        texts = set(cells[column.key])
        if column.priority > LEAST_NEEDED:
            left_out.append(column)
        elif len(table.rows) > 1 and len(texts) == 1 and column.key != "strategy":
            shared.append((column, texts.pop()))
        else:
            shown.append(column)
    widths = {column.key: max(map(len, [column.head, *cells[column.key]])) + GAP_CHARS for column in shown}
    while sum(widths[column.key] for column in shown) - GAP_CHARS > MAX_CHARS:
        least = max(shown, key=lambda column: column.priority)
        if least.priority <= NEVER_LEFT_OUT:
            break
        shown.remove(least)
        left_out.append(least)
    return shown, shared, left_out


def _notes(table: Table) -> list[str]:
    """Give the header's lines on how the study file was changed: what was measured stands in the other lines."""
    told = {clean(str(note)) for row in table.rows for note in row.values.get("study_notes") or ()}
    return [line for line in table.header if line in told]


def _caption(table: Table, notes: list[str], shared: list[tuple[Column, str]], has_front: bool) -> str:
    sentences = ["Peak memory and step time by activation-checkpointing strategy"]
    sentences += [line[:1].upper() + line[1:] for line in table.header if line not in notes]
    same = [f"{column.head} {text}" for column, text in shared if text != UNKNOWN]
    if same:
        sentences.append(f"In every row: {', '.join(same)}")
    if has_front:
        sentences.append("Bold: no row is better in both memory and median time")
    return escape(" ".join(f"{sentence.rstrip('.')}." for sentence in sentences))


def _label(table: Table) -> str:
    names = dict.fromkeys(str(row.values.get("study") or "table") for row in table.rows)
    return slug("-".join(names)).replace("_", "-")


def _on_front(rows: Sequence[Row]) -> list[bool]:
    """Tell which rows to make bold; in a group of one or two everything would be."""
    large = {group for group, members in by_group(rows) if len(members) >= MIN_FOR_FRONT}
    return [row.group in large and standing == "front" for row, standing in zip(rows, standings(rows), strict=True)]


def _place(row: Row, varied: Sequence[str]) -> list[str]:
    return [str(look_up(row.values, key)) for key in varied]


def _cell(column: Column, text: str, is_bold: bool) -> str:
    if column.key == "strategy":
        return rf"\textbf{{{escape(text)}}}" if is_bold else escape(text)
    if not column.is_number:
        return escape(text)
    written = re.sub(r"(?<=\d)\.\.(?=\d)", "--", escape(text))
    return re.sub(r"^([-+])", r"$\1$", written).replace(r" \%", r"\,\%")


def _line(cells: list[str]) -> str:
    return f"    {' & '.join(cells)} \\\\"


PLUGIN = render

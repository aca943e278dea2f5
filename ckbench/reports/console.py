"""console: the table for a terminal; fewer columns where space is short, never a cut number."""

import textwrap

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable

from ckbench.table import Column, Table

GAP = 2
MIN_TEXT_WIDTH = 30


def render(table: Table, *, width: int | None = None) -> str:
    """Draw the table in at most ``width`` columns; None shows every column, however wide."""
    lines = _wrap(table.header, width)
    if table.rows:
        lines += ["", *_body(table, width)]
    if table.failures:
        lines += ["", "did not end ok:", *_wrap([f"- {text}" for text in table.failures], width, hang=2)]
    if table.doubts:
        lines += ["", "doubts:", *_wrap([f"- {doubt}" for doubt in table.doubts], width, hang=2)]
    if table.skipped:
        lines += ["", "not used:", *_wrap([f"- {skip}" for skip in table.skipped], width, hang=2)]
    return "\n".join(lines) + "\n"


def _wrap(lines: list[str], width: int | None, hang: int = 2) -> list[str]:
    if width is None:
        return lines
    room = max(width, MIN_TEXT_WIDTH)
    indent = " " * hang
    return [piece for line in lines for piece in textwrap.wrap(line, room, subsequent_indent=indent) or [""]]


def _body(table: Table, width: int | None) -> list[str]:
    columns = fitting(table, width)
    if columns is None:
        return _as_list(table)
    drawn = RichTable(
        box=box.SIMPLE_HEAD if width is None or width >= 60 else None, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        drawn.add_column(column.head, justify="right" if column.is_number else "left", no_wrap=True)
    for cells in table.cells(columns):
        drawn.add_row(*cells)
    roomy = sum(_widths(table, columns)) + 4 * len(columns) + 4
    console = Console(width=roomy, color_system=None, force_terminal=False, legacy_windows=False, emoji=False)
    with console.capture() as capture:
        console.print(drawn, markup=False, highlight=False, crop=False, overflow="ignore")
    lines = [line.rstrip() for line in capture.get().splitlines()]
    edge = 1 if all(line[:1] in ("", " ", "─") for line in lines) else 0
    return [line[edge:] for line in lines if line]


def fitting(table: Table, width: int | None) -> list[Column] | None:
    """Choose the columns that fit, dropping the least important first.

    None when not even strategy, peak, step time and status fit.
    """
    columns = list(table.columns)
    while width is not None and sum(_widths(table, columns)) + GAP * (len(columns) - 1) > width:
        least = max(columns, key=lambda column: column.priority)
        if least.priority <= 2:
            return None
        columns.remove(least)
    return columns


def _widths(table: Table, columns: list[Column]) -> list[int]:
    cells = table.cells(columns)
    return [max([cell_len(c.head), *(cell_len(row[i]) for row in cells)]) for i, c in enumerate(columns)]


def _as_list(table: Table) -> list[str]:
    """Draw one figure per line, for terminals too narrow for a table."""
    columns = sorted(table.columns, key=lambda column: column.key != "strategy")  # the title first
    lines = []
    for cells in table.cells(columns):
        for column, text in zip(columns, cells, strict=True):
            is_title = column.key == "strategy"
            lines.append(text if is_title else f"  {column.head}: {text}")
        lines.append("")
    return lines[:-1]


PLUGIN = render

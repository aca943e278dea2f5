"""console: the table for a terminal; fewer columns where space is short, never a cut number."""

import textwrap

from rich.cells import cell_len

from ckbench.reports._terminal_plot import draw
from ckbench.reports.base import Findings
from ckbench.table import Column, Table

GAP = 2
MIN_TEXT_WIDTH = 30
MIN_RULED_WIDTH = 60


def render(findings: Findings, *, width: int | None = None) -> str:
    """Draw the tables in at most ``width`` columns; None shows every column, however wide."""
    return "\n".join(draw_table(table, width, has_chart=findings.charts) for table in findings.parts)


def draw_table(table: Table, width: int | None, *, has_chart: bool = True) -> str:
    """Draw one table, and under it a memory-time chart where the terminal allows."""
    lines = _wrap(table.header, width)
    if table.rows:
        lines += ["", *_body(table, width)]
    if has_chart and (chart := draw(table.rows, width)):
        lines += ["", *chart]
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
    cells = dict(zip((column.key for column in table.columns), _columns_of_cells(table), strict=True))
    columns = fitting(table, width, {key: _widest(column) for key, column in cells.items()})
    if columns is None:
        return _as_list(table)
    drawn = [_aligned(cells[column.key], column.is_number) for column in columns]
    lines = [(" " * GAP).join(parts).rstrip() for parts in zip(*drawn, strict=True)]
    if width is None or width >= MIN_RULED_WIDTH:
        lines.insert(1, "─" * max(cell_len(line) for line in lines))
    return lines


def _columns_of_cells(table: Table) -> list[list[str]]:
    """Write every column with its head on top, once: thousands of rows are drawn in a fraction of a second."""
    rows = table.cells()
    return [[column.head, *(row[i] for row in rows)] for i, column in enumerate(table.columns)]


def _widest(cells: list[str]) -> int:
    return max(map(cell_len, cells))


def _aligned(cells: list[str], to_the_right: bool) -> list[str]:
    """Pad a column to one width, counted in terminal cells: some characters take two."""
    width = _widest(cells)
    if to_the_right:
        return [" " * (width - cell_len(cell)) + cell for cell in cells]
    return [cell + " " * (width - cell_len(cell)) for cell in cells]


def fitting(table: Table, width: int | None, widths: dict[str, int] | None = None) -> list[Column] | None:
    """Choose the columns that fit, dropping the least important first.

    None when not even strategy, peak, step time and status fit.
    """
    columns = list(table.columns)
    if widths is None:
        widths = {c.key: _widest(cells) for c, cells in zip(columns, _columns_of_cells(table), strict=True)}
    while width is not None and sum(widths[c.key] for c in columns) + GAP * (len(columns) - 1) > width:
        least = max(columns, key=lambda column: column.priority)
        if least.priority <= 2:
            return None
        columns.remove(least)
    return columns


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

"""Tables at every width from 40 to 200: nothing is wider than the terminal, and no cell is cut."""

import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from ckbench import reporting, store
from ckbench.compare import compare
from ckbench.reports.console import fitting
from ckbench.table import build
from tests.prove import entry, tool
from tests.terminal import screen


@pytest.mark.parametrize("columns", range(40, 201, 4))
def test_a_table_fits_and_no_cell_is_cut(measured: Path, columns: int) -> None:
    answer = entry.call("report", str(measured / "results"), width=columns)
    entry.check_manners(answer)
    lines = answer.out.splitlines()
    assert max(map(cell_len, lines)) <= columns
    table = build(compare(store.read(measured / "results")[0]))
    shown = fitting(table, columns)
    written = re.sub(r"\s+", " ", answer.out)
    for cells in table.cells(shown or table.columns):
        if shown is not None:
            assert " ".join(cells) in written
        else:
            assert all(cell in written for cell in cells)
    assert "…" not in answer.out


def test_more_room_never_shows_less(measured: Path) -> None:
    table = build(compare(store.read(measured / "results")[0]))
    counts = [len(fitting(table, columns) or ()) for columns in range(30, 260)]
    assert counts == sorted(counts) and counts[-1] == len(table.columns)


@pytest.mark.parametrize("told", tool.some(1, (200, "70"), (40, ""), (80, ""), (200, ""), (80, "0")), ids=str)
def test_a_real_terminal_says_how_wide_it_is(measured: Path, told: tuple[int, str]) -> None:
    """The variable COLUMNS wins over what the terminal says."""
    columns, said = told
    code, written = screen.run(measured, "report", "results", columns=columns, COLUMNS=said)
    wanted = int(said or 0) or columns
    assert code == 0 and "\x1b" not in written
    assert screen.plain(written) == reporting.report(measured / "results", width=wanted)

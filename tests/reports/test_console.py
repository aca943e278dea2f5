"""The console table: whole at any width, in a pipe, and the same text every time."""

from pathlib import Path

import pytest

from ckbench import reporting
from ckbench.compare import compare
from ckbench.reports.console import draw_table, fitting
from ckbench.store import Skipped
from ckbench.table import build
from tests.sample_records import record, study

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("width", [None, 80, 60, 40])
def test_golden(width: int | None, request: pytest.FixtureRequest) -> None:
    """Compare with the kept text; run with --update-golden after a wanted change and read the diff."""
    text = reporting.draw(study(), format_="console", width=width)
    path = GOLDEN / f"console_{width or 'wide'}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 100, 132, 160, 200])
def test_no_line_is_longer_than_the_terminal_and_no_number_is_cut(width: int) -> None:
    text = reporting.draw(study(), format_="console", width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for label, step in (("none", "101"), ("per-block", "126"), ("every-k:2", "131")):
        assert label in text and step in text


def test_a_pipe_gets_every_column() -> None:
    table = build(compare(study()))
    assert fitting(table, None) == table.columns
    assert "tokens/s" in draw_table(table, None)


def test_columns_of_unknown_figures_are_left_out_and_unknown_cells_say_so() -> None:
    text = reporting.draw([record("none"), record("per-block", saved_bytes=None)], format_="console")
    assert "NVML" not in text
    assert "n/a" in text


def test_failures_say_what_happened() -> None:
    records = [
        record("none", status="oom", failed_phase="forward", message="tried to allocate 9 bytes"),
        record("full"),
    ]
    text = reporting.draw(records, format_="console", width=80)
    assert "- none: oom in forward: tried to allocate 9 bytes" in text


def test_control_characters_of_a_file_do_not_reach_the_terminal() -> None:
    text = reporting.draw([record("none", study="\x1b[31mred\r\n", message="x")], format_="console")
    assert "\x1b" not in text and "\r" not in text
    assert "?[31mred??" in text


def test_what_was_passed_over_is_named() -> None:
    table = build(compare(study()), skipped=[Skipped(path=Path("r.jsonl"), line=3, reason="not JSON")])
    assert "r.jsonl:3: not JSON" in draw_table(table, None)

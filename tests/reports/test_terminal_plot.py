"""The chart under a terminal's table: it fits, names every row, and stays away where it has no place."""

import itertools
import random

import pytest
from rich.cells import cell_len

from ckbench import output, reporting
from ckbench.compare import compare
from ckbench.reports._terminal_plot import MARKS, Axis, draw
from tests.sample_records import MIB, record, study

NAMES = ["none", "per-block", "every-k:2", "sqrt", "selective:every-2nd-matmul", "per-block,skip_last,early_stop=false"]
WIDTHS = (60, 61, 70, 80, 99, 132, 200)


def crowd(n_rows: int, seed: int, spread: float = 1.0) -> list[str]:
    """Draw many rows at random places; the smaller the spread, the closer together."""
    chance = random.Random(seed)
    records = [
        record(
            f"s{i:02d}-{NAMES[i % len(NAMES)]}",
            order=i,
            peak_allocated_bytes=int((500 + spread * chance.random() * 500) * MIB),
            step_s_median=0.1 + spread * chance.random(),
        )
        for i in range(n_rows)
    ]
    return draw(compare(records).rows, 80)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = draw(compare(study()).rows, width)
    assert lines and max(map(cell_len, lines)) <= width
    for label in ("none", "per-block", "every-k:2"):
        assert sum(label in line for line in lines) == 1


@pytest.mark.parametrize(
    ("n_rows", "seed", "spread"), list(itertools.product((3, 8, 23, 70), range(3), (1.0, 0.05, 0.0))), ids=str
)
def test_every_row_is_named_once_however_crowded(n_rows: int, seed: int, spread: float) -> None:
    lines = crowd(n_rows, seed, spread)
    assert max(map(cell_len, lines)) <= 80
    text = "".join(line.strip() for line in lines)
    for i in range(n_rows):
        assert text.count(f"s{i:02d}-{NAMES[i % len(NAMES)]}") == 1


def test_marks_stand_where_the_figures_say() -> None:
    """Least memory is at the left, least time at the bottom; the legend tells the marks that were used."""
    lines = draw(compare(study()).rows, 80)
    at = {
        label: next((i, line.index(label)) for i, line in enumerate(lines) if label in line)
        for label in ("none", "per-block", "every-k:2")
    }
    assert at["per-block"][1] < at["every-k:2"][1] < at["none"][1]
    assert at["every-k:2"][0] < at["per-block"][0] < at["none"][0]
    assert "× every-k:2" in "\n".join(lines), "more memory than per-block and slower in every round"
    assert lines[-1] == "● on the front   × dominated"


@pytest.mark.parametrize(
    ("width", "n_rows"), [(None, 3), (59, 3), (80, 2)], ids=["pipe", "narrow terminal", "two measured rows"]
)
def test_no_chart_where_it_has_no_place(width: int | None, n_rows: int) -> None:
    records = [r for r in study() if r["strategy"] in ("none", "per-block", "every-k:2")[:n_rows]]
    records.append(record("full", status="oom", peak_allocated_bytes=None, step_s_median=None))
    assert draw(compare(records).rows, width) == []
    assert "lower left" not in reporting.draw(records, width=width)


def test_it_can_be_turned_off() -> None:
    assert "lower left" in reporting.draw(study(), width=80)
    assert "lower left" not in reporting.draw(study(), width=80, charts=False)


@pytest.mark.parametrize("format_", ["md", "csv", "json", "latex"])
def test_other_formats_have_none(format_: str) -> None:
    assert reporting.draw(study(), format_=format_, width=80) == reporting.draw(study(), format_=format_, width=None)


def test_of_several_configurations_the_largest_is_drawn_and_named() -> None:
    records = [
        record(r["strategy"], round_number=r["round"], model__n_layers=depth, peak_allocated_bytes=depth * 10 * MIB)
        for depth in (4, 12, 8)
        for r in study(1)
    ]
    text = "\n".join(draw(compare(records).rows, 80))
    assert "memory against time, n_layers 12: lower left is better" in text
    assert "largest of 3 configurations; `report --group-by model.n_layers` draws one chart" in text
    grouped = reporting.findings(records, group_by="model.n_layers")
    charts = [draw(part.rows, 80) for part in grouped.parts]
    assert len(charts) == 3 and all(chart and "largest" not in chart[1] for chart in charts)


def test_everything_has_a_nearest_ascii() -> None:
    lines = [*crowd(23, 0), *draw(compare(study()).rows, 80)]
    translated = [line.translate(output.NEAREST_ASCII) for line in lines]
    assert all(line.isascii() for line in translated)
    assert list(map(len, translated)) == list(map(len, lines))
    assert len({mark.translate(output.NEAREST_ASCII) for mark in MARKS.values()}) == len(MARKS), "told apart there too"


def test_names_of_wide_characters_do_not_shift_the_grid() -> None:
    records = [record(name, order=i, peak_allocated_bytes=(50 + i) * MIB) for i, name in enumerate(("日本", "a", "b"))]
    lines = draw(compare(records).rows, 60)
    assert max(map(cell_len, lines)) <= 60
    assert lines[-1] == "a: 日本"


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([10.0, 90.0], ["20", "40", "60", "80"]),
        ([0.1234, 0.1238], ["0.122", "0.123", "0.124", "0.125", "0.126"]),
        ([100.0, 100.0], ["98", "99", "100", "101", "102"]),
        ([1e6, 3e6], ["1000000", "1500000", "2000000", "2500000", "3000000"]),
    ],
)
def test_numbers_on_an_axis_are_round(values: list[float], texts: list[str]) -> None:
    assert [text for _, text in Axis(values, n_ticks=5).ticks] == texts

"""CSV: one line per row, raw units, empty cells for unknown, no formulas from files."""

import csv
import io

import pandas

from ckbench import reporting
from tests.sample_records import record, study


def test_it_reads_back_as_a_frame() -> None:
    frame = pandas.read_csv(io.StringIO(reporting.draw(study(), format_="csv")))
    assert list(frame["strategy"]) == ["none", "per-block", "every-k:2"]
    assert frame["peak_allocated_bytes"].iloc[0] == 80 * 2**20
    assert frame["model.n_layers"].iloc[0] == 4


def test_unknown_is_an_empty_cell() -> None:
    (row,) = csv.DictReader(io.StringIO(reporting.draw([record("none")], format_="csv")))
    assert row["nvml_process_bytes"] == ""


def test_a_formula_is_only_text() -> None:
    (row,) = csv.DictReader(io.StringIO(reporting.draw([record("none", study="=1+2")], format_="csv")))
    assert row["study"] == "'=1+2"

"""Markdown: same number of cells in every row, nothing from a file becomes markup."""

import re
from pathlib import Path

import pytest

from ckbench import reporting
from tests.sample_records import record, study

GOLDEN = Path(__file__).parents[1] / "golden" / "table.md"


def test_golden(request: pytest.FixtureRequest) -> None:
    text = reporting.draw(study(), format_="md")
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_a_pipe_in_a_name_stays_in_its_cell() -> None:
    records = [record("none", model__family="a|b"), record("per-block", model__family="<script>x</script>\n| c |")]
    text = reporting.draw(records, format_="md")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert "a\\|b" in text
    assert "<script>" not in text

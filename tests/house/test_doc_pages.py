"""What the written pages promise to explain, they name: columns, marks, statuses, and the shelves' own words."""

import re
from pathlib import Path

from ckbench import compare, doubts, registry, specs, table

DOCS = Path(__file__).parents[2] / "docs"


def first_cells(page: str) -> set[str]:
    """Give every word in backticks in the first cell of a table's row."""
    rows = re.findall(r"^\| ([^|]+) \|", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row)}


def test_every_column_is_explained() -> None:
    named = first_cells("reading.md")
    assert {column.head for column in table.COLUMNS} - named == set()


def test_every_column_of_an_estimate_is_explained() -> None:
    from ckbench import estimating

    columns = estimating._columns((), "cuda", ("card", 1))
    assert {column.head for column in columns} - first_cells("reading.md") == set()


def test_every_mark_and_status_is_explained() -> None:
    named = first_cells("reading.md")
    assert set(table.PARITY_MARKS.values()) | set(compare.SEVERITY) <= named


def test_the_page_has_as_many_kinds_of_doubt_as_there_are_checks() -> None:
    """Two rows stand for two checks each (calls; parity), the notes have a sentence of their own."""
    text = (DOCS / "reading.md").read_text(encoding="utf-8").partition("## Doubts")[2]
    n_rows = len(re.findall(r"^\| ", text, flags=re.MULTILINE)) - 2
    assert n_rows == len(doubts.CHECKS) - 3


def test_the_overview_of_strategies_explains_every_option() -> None:
    assert set(specs.OPTIONS) <= first_cells("strategies/index.md")


def test_the_glossary_gives_only_names_that_exist() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\(strategies/([a-z-]+)\.md\)", text))
    assert named and named <= set(registry.names("strategies"))

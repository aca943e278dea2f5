"""docs/known-reports.md and the tests of this folder tell the same: every case once, every named test there."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "known-reports.md"
FILES = {
    **{"COR": "test_correctness.py", "MEM": "test_memory.py", "TIM": "test_timing.py", "OOM": "test_oom.py"},
    **{"NV": "test_nvml.py", "DST": "test_distributed.py", "UX": "test_ux.py"},
}
PENDING = re.compile(r"pending: issue ([3-7])")


def rows() -> list[list[str]]:
    """Give the cells of every row of the page's table."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def functions(file: str) -> list[str]:
    """List the test functions of one file."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def case_of(function: str) -> str:
    """Give the id in a test's name."""
    kind, number = re.match(r"test_([a-z]+)_(\d+)_", function).groups()  # type: ignore[union-attr]
    return f"{kind.upper()}-{number}"


ROWS = rows()


def test_every_case_has_one_row() -> None:
    counted = Counter(row[0] for row in ROWS)
    assert {case: n for case, n in counted.items() if n > 1} == {}
    assert Counter(case.partition("-")[0] for case in counted) == {
        **{"COR": 21, "MEM": 26, "TIM": 13, "OOM": 13, "NV": 10, "DST": 6, "UX": 19},
    }
    assert all(len(row) == 4 and all(row) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_its_tests_or_the_issue_it_waits_for(row: list[str]) -> None:
    case, _, _, last = row
    own = [name for name in functions(FILES[case.partition("-")[0]]) if case_of(name) == case]
    if PENDING.fullmatch(last):
        assert own == [], "a pending case has no test yet"
    else:
        assert last == ", ".join(f"`{name}`" for name in own) != ""


def test_every_test_of_a_case_is_named_on_the_page() -> None:
    known = {row[0] for row in ROWS}
    assert [name for file in FILES.values() for name in functions(file) if case_of(name) not in known] == []

"""Each file says its one job in its first line, stays readable in one sitting, and has a name that names something."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckbench

PACKAGE = Path(ckbench.__file__).parent
TESTS = Path(__file__).parents[1]
MAX_LINES = 400
DRAWERS = ("utils", "util", "helpers", "helper", "common", "misc", "manager", "handler", "tools")

SOURCES = sorted(PACKAGE.rglob("*.py"))
TEST_FILES = sorted(TESTS.rglob("*.py"))


def label(path: Path) -> str:
    root = PACKAGE.parent if path.is_relative_to(PACKAGE) else TESTS.parent
    return path.relative_to(root).as_posix()


def public_definitions(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield public classes and functions of a module, and public methods of public classes."""
    bodies: list[list[ast.stmt]] = [tree.body]
    while bodies:
        for node in bodies.pop():
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            yield node
            if isinstance(node, ast.ClassDef):
                bodies.append(node.body)


@pytest.mark.parametrize("path", [*SOURCES, *TEST_FILES], ids=label)
def test_file_has_one_job_and_fits_one_sitting(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, f"{label(path)} needs a docstring that says its job"
    first_line = docstring.splitlines()[0]
    assert 3 <= len(first_line) <= 117, f"{label(path)}: the first line is the summary"
    n_lines = text.count("\n")
    assert n_lines <= MAX_LINES, f"{label(path)} has {n_lines} lines, more than {MAX_LINES}; give it one job"


def test_no_file_is_a_drawer() -> None:
    found = [label(p) for p in (*SOURCES, *TEST_FILES) if p.stem.strip("_").removeprefix("test_") in DRAWERS]
    assert found == [], "name a file after its job"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = [
        f"{label(path)}:{node.lineno} {node.name}" for node in public_definitions(tree) if not ast.get_docstring(node)
    ]
    assert bare == []


def test_the_docstring_rule_can_fail() -> None:
    source = 'class A:\n    """Doc."""\n    def b(self): ...\n    def _c(self): ...\ndef d(): ...\n'
    bare = [node.name for node in public_definitions(ast.parse(source)) if not ast.get_docstring(node)]
    assert sorted(bare) == ["b", "d"]


def test_only_units_divides_by_powers_of_two() -> None:
    """GiB and MiB are for display, and display has one home."""
    found = []
    for path in SOURCES:
        if path.name == "units.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)):
                continue
            right = ast.unparse(node.right).replace(" ", "")
            if right in ("1024**2", "1024**3", "2**20", "2**30", "1<<20", "1<<30", "1048576", "1073741824"):
                found.append(f"{label(path)}:{node.lineno}: use ckbench.units")
    assert found == []

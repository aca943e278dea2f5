"""The documents say what the code says: record fields, paths, commands, strategies."""

import ast
import re
from pathlib import Path

import pytest

from ckbench import cli, records, registry, specs
from ckbench.compare import row_json
from ckbench.doctor import verified

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "configs" / "README.md"])
FIELDS_PAGE = ROOT / "docs" / "records.md"
BEGIN, END = "<!-- fields: begin -->", "<!-- fields: end -->"


def field_table() -> str:
    """Make the table of record fields from the source: name, type, the text under it."""
    tree = ast.parse(Path(records.__file__).read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Record").body
    lines = ["| field | type | meaning |", "| --- | --- | --- |"]
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        told = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        kind = ast.unparse(node.annotation).replace("|", "or")
        lines.append(f"| `{node.target.id}` | {kind} | {str(told).strip()} |")
    return "\n".join(lines)


def test_every_record_field_is_documented(request: pytest.FixtureRequest) -> None:
    page = FIELDS_PAGE.read_text(encoding="utf-8")
    wanted = f"{BEGIN}\n{field_table()}\n{END}"
    if request.config.getoption("--update-golden"):
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        FIELDS_PAGE.write_text(before + wanted + after, encoding="utf-8")
        page = FIELDS_PAGE.read_text(encoding="utf-8")
    assert wanted in page, "run pytest with --update-golden and read the diff"


def test_fields_that_only_rows_have_are_documented() -> None:
    page = FIELDS_PAGE.read_text(encoding="utf-8")
    from ckbench.compare import compare
    from tests.sample_records import study

    row = row_json(compare(study()).rows[0])
    for name in row:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_named_in_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:ckbench|configs|tests|docs|results|examples|benchmarks)/[A-Za-z0-9_./-]*)`", text)
    named += [target for target in re.findall(r"\]\(([^)#:]+)\)", text) if "://" not in target]
    for name in named:
        if name.startswith("results/") and "published" not in name:
            continue  # made by running
        assert (ROOT / name).exists() or (page.parent / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_named_in_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    commands = {
        command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback
    }
    for verb in re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE):
        assert verb in verbs, f"{page.name} says make {verb}"
    for command in re.findall(r"(?:^|`)ckbench ([a-z]+)", text, flags=re.MULTILINE):
        assert command in commands, f"{page.name} says ckbench {command}"


def test_readme_explains_every_strategy_and_option() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (*registry.names("strategies"), *specs.OPTIONS):
        assert f"`{name}" in text, name


def test_readme_says_whether_the_cuda_path_was_verified() -> None:
    assert verified() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_shipped_schema_is_the_one_the_config_makes() -> None:
    """Editors read the file: a stale one marks keys wrong that ckbench takes."""
    from ckbench import study_schema

    shipped = (ROOT / "configs" / "ckbench.schema.json").read_text(encoding="utf-8")
    assert shipped == study_schema.text(), "run `ckbench schema > configs/ckbench.schema.json`"

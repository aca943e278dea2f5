"""Markdown: same number of cells in every row, nothing from a file becomes markup, and GitHub calls nobody."""

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from ckbench import reporting
from tests.sample_records import record, study

GOLDEN = Path(__file__).parents[1] / "golden" / "table.md"
NASTY = "a|b * _c_ `d` ~~e~~ [f](g) <b>h</b> &amp; \\| $x$ @someone a@b.cc #12 GH-7 :tada: http://x.y www.z.de"


def test_golden(request: pytest.FixtureRequest) -> None:
    text = reporting.draw(study(), format_="md")
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def parsed(text: str) -> list[Token]:
    """Read Markdown with the tables and strikethrough of GitHub's dialect."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def shown(token: Token) -> str:
    """Give the text that a reader sees; anything but text and hidden HTML is markup."""
    children = token.children or []
    assert {child.type for child in children} <= {"text", "text_special", "html_inline"}, token.content
    html = [child.content for child in children if child.type == "html_inline"]
    assert set(html) <= {"<!-- -->", "<span>", "</span>"}
    return "".join(child.content for child in children if child.type != "html_inline")


def test_a_reader_sees_every_cell_as_it_is() -> None:
    records = [
        record("none", study=NASTY, model__family=NASTY),
        record("per-block", study=NASTY, model__family=f"# {NASTY}"),
        record(NASTY, study=NASTY, model__family="+ x"),
    ]
    found = reporting.findings(records)
    tokens = parsed(reporting.draw(records, format_="md"))
    cells = [shown(after) for token, after in zip(tokens, tokens[1:], strict=False) if token.type == "td_open"]
    assert cells == [" ".join(cell.split()) for row in found.whole.cells() for cell in row]
    items = [
        shown(token)
        for i, token in enumerate(tokens)
        if token.type == "inline" and tokens[i - 2].type == "list_item_open"
    ]
    assert items[: len(found.whole.header)] == [" ".join(line.split()) for line in found.whole.header]


def test_tables_of_groups_are_tables_of_their_own() -> None:
    records = [record(name, model__n_layers=depth) for depth in (4, 8) for name in ("none", "full")]
    tokens = parsed(reporting.draw(records, format_="md", group_by="model.n_layers"))
    assert sum(token.type == "table_open" for token in tokens) == 2
    assert sum(token.type == "td_open" for token in tokens) > 40


@pytest.mark.parametrize(
    ("name", "kept_apart"), [("@someone", "@<"), ("x#12", "#<"), ("GH-7", "GH-<"), (":tada:", ":<"), ("$a$", "$<")]
)
def test_nothing_that_github_would_act_on_is_left(name: str, kept_apart: str) -> None:
    text = reporting.draw([record("none", study=name), record("full", study=name)], format_="md")
    assert name not in text and kept_apart in text


def test_a_pipe_in_a_name_stays_in_its_cell() -> None:
    records = [record("none", model__family="a|b"), record("per-block", model__family="<script>x</script>\n| c |")]
    text = reporting.draw(records, format_="md")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert "a\\|b" in text
    assert "<script>" not in text

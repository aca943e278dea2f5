"""md: a Markdown table with every column, for pull requests and papers' appendices."""

import re

from ckbench.reports.base import Findings
from ckbench.table import Table

GITHUB_SIGNS = (
    re.compile(r"@(?=\w)"),
    re.compile(r"#(?=\d)"),
    re.compile(r"\bGH-(?=\d)", re.IGNORECASE),
    re.compile(r":(?=[\w+\\-]+:)"),
)
"""What GitHub makes a mention, a link to an issue or a picture of, also where it is escaped: an empty comment, which no
reader sees, keeps it apart."""


def render(findings: Findings, *, width: int | None = None) -> str:
    """Draw the tables in Markdown; text from files is escaped."""
    return "\n".join(map(_table, findings.parts))


def _table(table: Table) -> str:
    lines = [_item(line) for line in table.header]
    if table.rows:
        heads = [column.head for column in table.columns]
        rules = ["--:" if column.is_number else "---" for column in table.columns]
        lines += ["", _line([escape(head) for head in heads]), _line(rules)]
        lines += [_line([escape(cell) for cell in cells]) for cells in table.cells()]
    for title, texts in (
        ("Did not end ok", table.failures),
        ("Doubts", [str(doubt) for doubt in table.doubts]),
        ("Not used", [str(skip) for skip in table.skipped]),
    ):
        if texts:
            lines += ["", f"**{title}**", "", *map(_item, texts)]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Write text so that Markdown shows it as it is: no markup, no table cell, no HTML, and on GitHub nobody is called.

    >>> escape("a_b|c"), escape("@someone"), escape("#12")
    ('a\\\\_b\\\\|c', '@<!-- -->someone', '#<!-- -->12')
    """
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\|`*_~\[\]])", r"\\\1", text)
    for sign in GITHUB_SIGNS:
        text = sign.sub(r"\g<0><!-- -->", text)
    text = text.replace("://", "&#58;//").replace("www.", "www&#46;")  # bare addresses become links there
    return text.replace("$", "<span>$</span>")  # two of them make a formula there


def _item(text: str) -> str:
    """Write a list item; what begins a heading, another list or a code block inside one is escaped."""
    return "- " + re.sub(r"^(\d*)([#+=.)-])", r"\1\\\2", escape(text))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


PLUGIN = render

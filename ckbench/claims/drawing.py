"""Verdicts as text: for a terminal, as a Markdown page, as JSON."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from ckbench import output
from ckbench.claims.base import OUTCOMES
from ckbench.claims.catalogue import ESTIMATED, SEARCHED, Judged
from ckbench.claims.evidence import Evidence
from ckbench.host import is_busy
from ckbench.store import Skipped
from ckbench.units import clean

FORMATS = ("console", "md", "json")
PLAIN_WIDTH = 100


def study_file(name: str) -> str:
    """Give a study's path as its files are named in the source tree."""
    return f"configs/articles/{name}.yaml"


def draw(
    judged: Sequence[tuple[Evidence, list[Judged]]],
    *,
    format_: str,
    source: str,
    skipped: Sequence[Skipped] = (),
    width: int | None = None,
) -> str:
    """Write the verdicts of every device. ``source`` is the folder the figures are from. Raises ConfigError."""
    output.check_format(format_, FORMATS)
    if format_ == "json":
        told = [_json(evidence, items) for evidence, items in judged]
        return json.dumps(told, indent=1, ensure_ascii=False) + "\n"
    if format_ == "md":
        return _page(judged, source)
    parts = [_console(evidence, items, width or PLAIN_WIDTH) for evidence, items in judged]
    passed_over = "".join(f"not used: {skip}\n" for skip in skipped)
    return "\n".join(parts) + passed_over


def count(items: list[Judged]) -> str:
    """Say how many claims got which verdict."""
    numbers = {outcome: sum(1 for item in items if item.verdict.outcome == outcome) for outcome in OUTCOMES}
    return ", ".join(f"{outcome}: {n}" for outcome, n in numbers.items() if n)


def conditions(evidence: Evidence) -> list[str]:
    """Say on what the rows were measured, a line per fact."""
    rows = evidence.rows
    lines = [f"device: {evidence.device or 'none: estimates alone'}"]
    for key in ("torch", "ckbench", "threads"):
        known = dict.fromkeys(str(row["environment"][key]) for row in rows if row["environment"].get(key) is not None)
        if known:
            lines.append(f"{key}: {', '.join(sorted(known))}")
    dates = sorted(row["started_at"][:10] for row in rows if row["started_at"])
    if dates:
        lines.append(f"date: {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else ""))
    busy = [row for row in rows if is_busy(row["environment"])]
    if busy:
        lines.append(f"busy: other work ran during {len(busy)} of {len(rows)} rows; times suffer from it, bytes do not")
    return [clean(line) for line in lines]


def headline(item: Judged) -> str:
    """Give the verdict in words: ``holds only if attention is fused``."""
    verdict = item.verdict
    return f"{verdict.outcome} {verdict.condition}" if verdict.condition else verdict.outcome


def _console(evidence: Evidence, items: list[Judged], width: int) -> str:
    lines = []
    for told in (*conditions(evidence), f"claims: {len(items)}; {count(items)}"):
        lines += textwrap.wrap(told, width, subsequent_indent="  ")
    lines.append("")
    for item in items:
        claim, verdict = item.claim, item.verdict
        lines += textwrap.wrap(f"{claim.name}: {claim.text}", width, subsequent_indent="  ")
        for label, told in (
            ("", headline(item).upper() if not verdict.condition else _shout(item)),
            ("", verdict.reason),
            ("figures: ", "; ".join(figure.text() for figure in verdict.figures)),
            ("formula: ", claim.formula),
            ("study: ", ", ".join(map(study_file, claim.studies))),
            ("source: ", claim.source),
        ):
            if told:
                lines += textwrap.wrap(clean(label + told), width, initial_indent="  ", subsequent_indent="    ")
        lines.append("")
    return "\n".join(lines)


def _shout(item: Judged) -> str:
    return f"{item.verdict.outcome.upper()} {item.verdict.condition}"


def _json(evidence: Evidence, items: list[Judged]) -> dict[str, Any]:
    return {
        "device": evidence.device,
        "claims": [
            {
                "name": item.claim.name,
                "claim": item.claim.text,
                "outcome": item.verdict.outcome,
                "condition": item.verdict.condition or None,
                "reason": item.verdict.reason,
                "figures": [vars(figure) for figure in item.verdict.figures],
                "formula": item.claim.formula,
                "source": item.claim.source,
                "studies": [study_file(name) for name in item.claim.studies],
            }
            for item in items
        ],
    }


def _page(judged: Sequence[tuple[Evidence, list[Judged]]], source: str) -> str:
    lines = [
        "# Claims put to the test",
        "",
        "What articles and papers say of activation checkpointing, and what ckbench's figures say of that.",
        f"Made by `ckbench report {source} --claims --format md` from stored records; do not edit it by hand.",
        "`ckbench claims` measures and estimates everything anew. A verdict comes from figures alone: bytes and FLOPs",
        "are exact, times carry a 95 % interval, models too large to run are estimated by layers. GB is 10⁹ bytes.",
    ]
    for number, (evidence, items) in enumerate(judged):
        place = f"-{number + 1}" if number else ""  # an anchor is there once
        lines += [
            "",
            *(f"* {line}" for line in map(_escape, conditions(evidence))),
            f"* {len(items)} claims: {count(items)}",
        ]
        lines += ["", "| claim | verdict |", "| --- | --- |"]
        lines += [f"| [{_escape(i.claim.text)}](#{i.claim.name}{place}) | {_bold(i)} |" for i in items]
        for item in items:
            lines += ["", *_section(item, place)]
    return "\n".join(lines) + "\n"


def _section(item: Judged, place: str) -> list[str]:
    claim, verdict = item.claim, item.verdict
    lines = [f'<a id="{claim.name}{place}"></a>', "", f"## {_escape(claim.text)}", ""]
    lines.append(f"{_bold(item)}. {_escape(verdict.reason)}")
    if verdict.figures:
        lines += ["", *(f"* {_escape(figure.text())}" for figure in verdict.figures)]
    commands = ", ".join(f"`{command(name)}`" for name in claim.studies)
    lines += ["", f"Formula: {_escape(claim.formula)}.  "]
    return [*lines, f"Study: {commands}.  ", f"Said by: {_escape(claim.source)}."]


def command(study: str) -> str:
    """Give the command that measures or estimates a study by itself."""
    file = study_file(study)
    if study in ESTIMATED:
        return f"ckbench estimate {file}"
    return f"ckbench plan {file} --max layers --estimate --budget 24GiB" if study in SEARCHED else f"ckbench run {file}"


def _bold(item: Judged) -> str:
    told = f"**{item.verdict.outcome}**"
    return f"{told} {_escape(item.verdict.condition)}" if item.verdict.condition else told


def _escape(text: str) -> str:
    """Keep a table cell one cell and text plain."""
    for sign in "\\|*_<>":
        text = text.replace(sign, "\\" + sign if sign in "\\|*_" else {"<": "&lt;", ">": "&gt;"}[sign])
    return text

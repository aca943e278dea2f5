"""Broken and hostile result files: each line is used or named and passed over, in every format, never a traceback."""

import copy
import csv
import io
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.prove import entry, mutations
from tests.sample_records import record, study

N_FAST, N_PROVE = 30, 700
WIDTHS = (None, 1, 40, 60, 80, 200)
FORMATS = ("console", "md", "csv", "json")
MARK = "untouched"

WORDS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63 - 1, 2**63, 10**30, 10**400, -(10**400), 0.0, -0.0, -0.5, 1e-320,
    1e-9, 1e9, 1e308, float("inf"), float("nan"), "", "none", "x" * 5000, "\x1b[2J\x1b]0;owned\x07", "\x9b2J",
    "\u202egnp.exe", "\u200b", "\ud800", "\0", "a\nb\rc\td", "=cmd|' /C calc'!A0", "+1", "-1", "@x", " =1+1",
    "\n=1+1", "＝1", "<img src=x onerror=alert(1)>", "[a](http://b.c)", "![x](http://b.c)", "http://b.c www.b.c",
    "| a | b |", "`x`", "# head", "~~~", "1. x", "- - x", "&lt;", "日本語", ":smile:", "[red]x[/]",
    "../../../../outside", "2026-11-29T10:00:00.000+00:00", "9999", [], {}, [[]], [1, "x", None], [0.1, 0.2], [-1.0],
    [1e308] * 3, [10**400], {"a": {"b": {"c": [1, {"d": None}]}}}, {"": 0}, {"\x1b[31m": "=1"}, {"|": "<b>"},
    {"x" * 300: 1}, "ok", "oom", "forward", "exact",
)  # fmt: skip
RECKONED = (
    "step_s_median", "step_s_low", "step_s_high", "samples", "outliers", "round", "order", "started_at", "session_id",
    "peak_allocated_bytes", "saved_bytes", "flops_forward", "flops_backward", "block_calls_backward", "tokens_per_s",
    "forward_s", "step_samples_s", "n_parameters", "environment", "train", "run", "model", "notes", "study_notes",
)  # fmt: skip
"""Fields that tables compute with."""
DEEP = "[" * 200 + "]" * 200


def broken(seed: object) -> bytes:
    """Give a results file whose records are broken in a few places; the same seed gives the same file."""
    draw = random.Random(f"results {seed}")
    records = copy.deepcopy(study(draw.choice((1, 2, 3))))
    for _ in range(draw.choice((1, 1, 2, 4, 9))):
        _break(draw.choice(records), draw)
    lines = [json.dumps(values).encode() for values in records]  # NaN and Infinity as Python writes them
    for _ in range(draw.choice((0, 0, 1, 2))):
        at = draw.randrange(len(lines))
        lines[at] = draw.choice(
            (
                lambda line: mutations.mutant(draw.random(), [line]),
                lambda line: line[: draw.randrange(len(line) + 1)],
                lambda line: line.replace(b'"environment": {', b'"environment": {"deep": ' + DEEP.encode() + b", ", 1),
                lambda line: draw.choice(
                    (b"", b"null", b"[]", b"0", b'"x"', b"\xff\xfe", b"{}", b"[" * 100_000, b"\x00" * 10)
                ),
            )
        )(lines[at])
    good = json.dumps(record("none", study=MARK, record_id=MARK, train__batch_size=3))
    lines.insert(draw.randrange(len(lines) + 1), good.encode())
    return draw.choice((b"\n", b"\n", b"\n", b"\r\n")).join(lines) + draw.choice((b"\n", b""))


def _break(values: dict[str, Any], draw: random.Random) -> None:
    """Change one field, or a key of a section, or the type of one."""
    word = copy.deepcopy(draw.choice(WORDS))
    key = draw.choice([*values, *(key for key in RECKONED * 3 if key in values)])
    sections = [name for name, value in values.items() if isinstance(value, dict)]
    kind = draw.randrange(5)
    if kind == 0 and sections:
        section = values[draw.choice(sections)]
        section[draw.choice([*section, "extra", "\x1b[7m", "a|b"])] = word
    elif kind == 1:
        values.pop(key)
    elif kind == 2:
        same = [value for value in WORDS if type(value) is type(values[key])]
        values[key] = copy.deepcopy(draw.choice(same)) if same else word
    elif kind == 3:
        values[key] = copy.deepcopy(draw.choice(list(values.values())))
    else:
        values[key] = word


def check(data: bytes, width: int | None) -> None:
    """Report one file in every format; the untouched record must be there each time."""
    Path("stored").mkdir()
    Path("stored/s.jsonl").write_bytes(data)
    for format_ in FORMATS:
        answer = entry.call("report", "stored", "--format", format_, width=width if format_ == "console" else None)
        entry.check_manners(answer, data)
        assert answer.code == 0, (answer, data)
        CHECKS[format_](answer.out)
    shutil.rmtree("stored")


def check_console(text: str) -> None:
    assert MARK in text.replace("\n", " ")


def check_markdown(text: str) -> None:
    assert MARK in text
    cells = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in text.splitlines() if line.startswith("|")}
    assert len(cells) == 1
    text = text.replace("<!-- -->", "")  # ours: it keeps @, # and the like apart from the word behind
    assert "<" not in text and "://" not in text and "](" not in text.replace("\\]", "")
    assert all(re.match(r"(- ([^\s#+=.)-]|\\)|\||\*\*|$)", line) for line in text.splitlines())


def check_csv(text: str) -> None:
    head, *rows = list(csv.reader(io.StringIO(text)))
    assert rows and all(len(row) == len(head) for row in rows)
    assert len(text.splitlines()) == len(rows) + 1
    for cell in (*head, *(cell for row in rows for cell in row)):
        assert cell.lstrip()[:1] not in ("=", "+", "@", "＝") and not re.match(r"\s*[-－](?![\d.])", cell)
    assert MARK in {row[head.index("study")] for row in rows}


def check_json(text: str) -> None:
    rows = json.loads(text, parse_constant=_refuse)
    assert text.isascii() and MARK in {row["study"] for row in rows}


def _refuse(text: str) -> float:
    raise AssertionError(f"{text} is not JSON")


CHECKS = {"console": check_console, "md": check_markdown, "csv": check_csv, "json": check_json}


def run_broken(numbers: range) -> None:
    for number in numbers:
        try:
            check(broken(number), WIDTHS[number % len(WIDTHS)])
        except BaseException as error:
            error.add_note(f"broken file {number}")
            raise


def test_broken_result_files(folder: Path) -> None:
    run_broken(range(N_FAST))


@pytest.mark.prove
def test_broken_result_files_at_length(folder: Path) -> None:
    run_broken(range(N_PROVE))

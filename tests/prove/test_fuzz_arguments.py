"""Command lines of real options and hostile words: each works or is refused, and nothing is written for a refused one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.prove import entry, hostile
from tests.sample_records import study

CALM: dict[str, Any] = {"suppress_health_check": list(HealthCheck)}
STUDY = """\
model: {n_layers: 4, d_model: 32, n_heads: 4, vocab_size: 64}
train: {batch_size: 2, seq_len: 16}
strategies: [none, per-block]
"""

files = st.sampled_from(
    ("study.yaml", "study.yaml", "study.yaml", "missing.yaml", ".", "x" * 5000, "\udcff", "a\nb", "")
)
results = st.sampled_from(
    ("stored", "stored", "stored/s.jsonl", "missing", "study.yaml", "x" * 5000, "\udcff", "a\nb", "\x1b[31m", "")
)
shelves = st.one_of(st.sampled_from(("strategies", "reports", "model")), hostile.any_text)
commands = st.one_of(
    hostile.arguments("run", files),
    hostile.arguments("sweep", files),
    hostile.arguments("sweep"),
    hostile.arguments("report", results),
    hostile.arguments("list", shelves),
    hostile.arguments("schema"),
    st.lists(hostile.any_text, max_size=3).map(lambda words: [word.replace("\0", "") for word in words]),
)


@pytest.fixture
def written(folder: Path) -> Path:
    """Put a good study and good records where the command lines look for them."""
    Path("study.yaml").write_text(STUDY)
    Path("file").write_text("")
    write_records(Path("stored"))
    return folder


def write_records(into: Path) -> None:
    """Store a session of sample records."""
    import json

    into.mkdir()
    (into / "s.jsonl").write_text("".join(json.dumps(values) + "\n" for values in study()))


def check(arguments: list[str]) -> None:
    """Call the command line; measuring commands get the scripted device and small caps last, where they win."""
    if arguments[:1] in (["run"], ["sweep"]):
        arguments = [*arguments, "--device", "replay:script.json", *entry.CAPS]
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    answer = entry.call(*arguments)
    entry.check_manners(answer)
    after = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    if answer.code == 2:
        assert {path for path in after if path not in before and path.name != ".lock"} == set(), arguments
    assert all(after.get(path) == content for path, content in before.items()), arguments
    for path in after.keys() - before.keys():
        path.unlink()
    shutil.rmtree("results", ignore_errors=True)


@settings(max_examples=60, **CALM)
@given(arguments=commands)
def test_hostile_command_lines(written: Path, arguments: list[str]) -> None:
    check(arguments)


@pytest.mark.prove
@settings(max_examples=700, **CALM)
@given(arguments=commands)
def test_hostile_command_lines_at_length(written: Path, arguments: list[str]) -> None:
    check(arguments)

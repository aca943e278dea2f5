"""--resume goes on exactly where a file ends, whatever byte that is, and only with what was measured the same way."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckbench import store
from tests.prove import entry, tool

N_FAST, N_PROVE = 7, 100
SWEEP = (*tool.SWEEP, "--device", "replay:script.json", "--rounds", "2")


KEPT: dict[str, bytes] = {}


@pytest.fixture
def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the results file of a study that was measured to its end, once for all tests."""
    monkeypatch.setattr(entry, "MAX_TRIALS", 10**6)
    tool.write_study(folder)
    if not KEPT:
        assert entry.call(*SWEEP).code == 0
        (file,) = entry.records_below(Path("results"))
        KEPT[file.name] = file.read_bytes()
    ((name, data),) = KEPT.items()
    file = Path("results", name)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data)
    return file


def cut_and_resume(measured: Path, positions: list[int]) -> None:
    """Cut the results file at each position, resume, and compare with the uninterrupted run."""
    data = measured.read_bytes()
    whole, table = tool.rows(Path()), entry.call("report", "results", "--format", "csv").out
    for position in positions:
        shutil.rmtree("results")
        measured.parent.mkdir()
        measured.write_bytes(data[:position])
        answer = entry.call(*SWEEP)
        assert answer.code == 0, (position, answer)
        assert tool.rows(Path()) == whole, position
        shown = entry.call("report", "results", "--format", "csv")
        assert columns_kept(shown.out) == columns_kept(table), position
        assert measured.read_bytes().startswith(data[:position])
        again = entry.call(*SWEEP)
        assert "0 trials to run" in again.err and tool.rows(Path()) == whole, position


def columns_kept(text: str) -> list[dict[str, Any]]:
    import csv
    import io

    return [{k: v for k, v in row.items() if k not in tool.VOLATILE} for row in csv.DictReader(io.StringIO(text))]


def test_a_file_cut_at_any_byte(measured: Path) -> None:
    draw = random.Random(1)
    data = measured.read_bytes()
    ends = [match.end() for match in re.finditer(b"\n", data)]
    cut_and_resume(measured, [0, 1, len(data) - 1, *draw.sample(ends, 2), *draw.sample(range(len(data)), N_FAST - 5)])


@pytest.mark.prove
def test_a_file_cut_at_any_byte_at_length(measured: Path) -> None:
    draw = random.Random(2)
    data = measured.read_bytes()
    ends = [match.end() for match in re.finditer(b"\n", data)]
    near = [at + shift for at in draw.sample(ends, 10) for shift in (-1, 1) if at + shift <= len(data)]
    cut_and_resume(measured, [*ends, *near, *draw.sample(range(len(data)), N_PROVE - len(ends) - len(near))])


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every record of a file."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        change(record)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def trials(answer: entry.Answer) -> tuple[int, int]:
    """Read how many trials a session ran and how many were there."""
    match = re.match(r"(\d+) trials to run(?:, (\d+) are there from before)?", answer.err)
    assert match, answer
    return int(match[1]), int(match[2] or 0)


ENDINGS = {
    ("none", 2): "ok",
    ("none", 3): "killed",
    ("none", 4): "timeout",
    ("per-block", 2): "error",
    ("per-block", 3): "invalid",
    ("per-block", 4): "recompute_mismatch",
    ("full", 4): "oom",
}


def test_what_failed_is_tried_again_and_what_ended_is_not(measured: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        if record["round"] == 0:
            record["status"] = ENDINGS.get((record["strategy"], record["model"]["n_layers"]), record["status"])

    n_jobs = sum(trials(entry.call(*SWEEP)))
    edit(measured, change)
    answer = entry.call(*SWEEP)
    assert answer.code == 0 and trials(answer) == (5, n_jobs - 5)
    newest = {
        (r["strategy"], r["model"]["n_layers"]): r["status"] for r in store.read(Path("results"))[0] if r["round"] == 0
    }
    assert {place: newest[place] for place in ENDINGS} == {
        place: "oom" if status == "oom" else "ok" for place, status in ENDINGS.items()
    }


def test_out_of_memory_is_tried_again_when_asked(measured: Path) -> None:
    script = json.loads(Path("script.json").read_text())
    script["strategies"].pop("ffn-only")
    Path("script.json").write_text(json.dumps(script))
    assert trials(entry.call(*SWEEP))[0] == 0
    answer = entry.call(*SWEEP, "--retry-oom")
    assert trials(answer)[0] == 3 * 2
    assert "oom" not in answer.out


OTHER = (
    ("code", "other"), ("device_name", "another card"), ("torch", "1.0"), ("threads", 77),
    ("allocator", {"PYTORCH_ALLOC_CONF": "x"}),
)  # fmt: skip


@pytest.mark.parametrize("other", tool.some(2, *OTHER), ids=lambda other: other[0])
def test_another_version_device_or_setting_is_measured_anew(measured: Path, other: tuple[str, Any]) -> None:
    key, value = other

    def change(record: dict[str, Any]) -> None:
        record.update(device_name=value) if key == "device_name" else record["environment"].update({key: value})

    edit(measured, change)
    n_run, n_there = trials(entry.call(*SWEEP))
    assert n_there == 0 and n_run > 20
    sessions = {record["session_id"] for record in store.read(Path("results"))[0]}
    assert len(sessions) == 2


SETTINGS = ("train.batch_size=3", "run.seed=1", "model.dropout=0.5", "run.threads=1")


@pytest.mark.parametrize("setting", tool.some(2, *SETTINGS))
def test_another_configuration_is_measured_anew(measured: Path, setting: str) -> None:
    assert trials(entry.call(*SWEEP, "--set", setting))[1] == 0


def test_more_rounds_and_strategies_add_to_what_is_there(measured: Path) -> None:
    """One round more for each strategy, and three of segments:3 at depth 4; at 2 and 3 its plan is that of per-block."""
    before = len(store.read(Path("results"))[0])
    more = ("--rounds", "3", "-s", "none", "-s", "per-block", "-s", "segments:3")
    assert trials(entry.call(*SWEEP, *more)) == (3 + 3 + 3, 3 * 2 * 2)
    assert len(store.read(Path("results"))[0]) == before + (3 + 3 + 3) + 2 * 3


def test_rounds_added_for_precision_are_not_measured_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "MAX_TRIALS", 10**6)
    tool.write_study(folder)
    more = (*SWEEP, "--max-rounds", "4", "--layers", "2", "-s", "none", "-s", "per-block")
    assert entry.call(*more).code == 0
    (file,) = entry.records_below(Path("results"))
    data = file.read_bytes()
    whole = tool.rows(Path())
    assert {row["round"] for row in whole} == {0, 1, 2, 3}
    for n_lines in (3, 5, 7, 8):
        shutil.rmtree("results")
        file.parent.mkdir()
        file.write_bytes(b"".join(data.splitlines(keepends=True)[:n_lines]))
        assert entry.call(*more).code == 0
        assert tool.rows(Path()) == whole, n_lines


def test_a_second_resume_goes_on_with_the_first(measured: Path) -> None:
    """Parts of one session lie in several files; together they are one table."""
    data = measured.read_bytes().splitlines(keepends=True)
    measured.write_bytes(b"".join(data[: len(data) // 2]))
    one = entry.call(*SWEEP)
    two = entry.call(*SWEEP)
    assert tool.lasting(one.out) == tool.lasting(two.out) == tool.lasting(entry.call("report", "results").out)
    assert len({record["session_id"] for record in store.read(Path("results"))[0]}) == 1

"""The store loses nothing that was written and believes nothing that is not a record."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ckbench import store
from ckbench.errors import StoreError
from ckbench.records import SCHEMA, Record
from ckbench.store import ResultStore
from tests.sample_records import record


def write(folder: Path, *records: dict[str, Any], study: str = "sample") -> Path:
    with ResultStore(folder, study, "abcd1234") as results:
        for values in records:
            results.append(Record(**values))
    return results.path


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    written = [record("none"), record("per-block")]
    write(tmp_path, *written)
    read, skipped = store.read(tmp_path)
    assert read == written
    assert skipped == []


def test_a_cut_last_line_loses_only_itself(tmp_path: Path) -> None:
    path = write(tmp_path, record("none"), record("per-block"))
    data = path.read_bytes()
    for cut in (1, 10, len(data.splitlines()[1]) // 2):
        path.write_bytes(data[:-cut])
        read, skipped = store.read(tmp_path)
        if cut == 1:  # only the line's end is missing: the record itself is whole
            assert [r["strategy"] for r in read] == ["none", "per-block"]
            continue
        assert [r["strategy"] for r in read] == ["none"]
        assert [str(s) for s in skipped] == [f"{path}:2: cut short (the write was interrupted)"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1, 2]", "not a ckbench record"),
        ('{"epoch": 3, "loss": 0.1}', "not a ckbench record"),
        ("hello", "not JSON"),
        ('{"schema": 1, "strategy": "none", "peak_allocated_bytes": NaN}', "not JSON"),
        ('{"schema": 99, "strategy": "none"}', f"schema 99 is newer than this ckbench reads ({SCHEMA}); upgrade ckbench"),
        ('{"schema": true, "strategy": "none"}', "field schema has a value it cannot have"),
        ('{"schema": "x", "strategy": "none"}', "unknown schema 'x'"),
        ('{"schema": 1, "strategy": "none", "status": "fine"}', "unknown status 'fine'"),
        ('{"schema": 1, "strategy": 7}', "field strategy has a value it cannot have"),
        ('{"schema": 1, "strategy": "none", "peak_allocated_bytes": "12"}', "field peak_allocated_bytes has a value it cannot have"),
        ('{"schema": 1, "strategy": "none", "step_s_median": 1e999}', "field step_s_median has a value it cannot have"),
        ('{"schema": 1, "strategy": "none", "step_samples_s": [0.1, "x"]}', "field step_samples_s has a value it cannot have"),
        ('{"schema": 1, "strategy": "none", "model": [1]}', "field model has a value it cannot have"),
        ("[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_record_is_named_and_passed_over(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path, record("none"))
    path.write_text(line + "\n" + path.read_text())
    read, skipped = store.read(tmp_path)
    assert [r["strategy"] for r in read] == ["none"]
    assert [str(s) for s in skipped] == [f"{path}:1: {reason}"]


def test_empty_and_binary_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, record("none"))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "noise.jsonl").write_bytes(bytes(range(256)))
    read, skipped = store.read(tmp_path)
    assert len(read) == 1
    assert {s.path.name for s in skipped} == {"empty.jsonl", "noise.jsonl"}


def test_a_record_copied_into_a_second_file_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path, record("none"))
    (tmp_path / "copy.jsonl").write_bytes(path.read_bytes())
    read, skipped = store.read(tmp_path)
    assert len(read) == 1
    assert "was read before" in skipped[0].reason


def test_published_is_read_only_when_named(tmp_path: Path) -> None:
    write(tmp_path, record("none"))
    write(tmp_path / "published" / "card", record("per-block"))
    assert [r["strategy"] for r in store.read(tmp_path)[0]] == ["none"]
    assert [r["strategy"] for r in store.read(tmp_path / "published")[0]] == ["per-block"]


def test_two_sessions_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with ResultStore(tmp_path, "a", "1"), pytest.raises(StoreError, match="another ckbench is writing there"):
        ResultStore(tmp_path, "b", "2").__enter__()
    with ResultStore(tmp_path, "c", "3"):
        pass


@pytest.mark.parametrize(
    "name", ["a:b|c*?", "run 2026-01-01T10:00:00", "../../etc/passwd", "日本", "x" * 500, "...", "CON: <a>"]
)
def test_file_names_are_safe_everywhere(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, record("none"), study=name)
    assert path.parent == tmp_path
    assert re.fullmatch(r"[A-Za-z0-9._-]+", path.name)
    assert len(path.name) < 120


def test_a_results_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("x")
    with pytest.raises(StoreError, match="is a file, not a results folder"):
        ResultStore(tmp_path / "results", "a", "1").__enter__()
    with pytest.raises(StoreError, match="a parent of it is a file"):
        ResultStore(tmp_path / "results" / "deeper", "a", "1").__enter__()


def test_a_missing_folder_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such results folder; `ckbench run` makes one"):
        store.read(tmp_path / "nothing")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, record("none"))
    before = path.read_bytes()
    real_write = os.write

    def full_disk(target: int, data: bytes) -> int:
        if len(data) > 100:
            return real_write(target, data[:100])
        raise OSError(28, "No space left on device")

    with ResultStore(tmp_path, "sample", "abcd1234") as results:
        results.path = path
        monkeypatch.setattr(os, "write", full_disk)
        monkeypatch.setattr(os, "fsync", lambda target: full_disk(target, b""))
        with pytest.raises(StoreError, match="No space left on device"):
            results.append(Record(**record("per-block")))
    monkeypatch.undo()
    assert path.read_bytes() == before


def test_lines_are_strict_json(tmp_path: Path) -> None:
    path = write(tmp_path, record("none", step_s_low=None))

    def refuse(text: str) -> float:
        raise AssertionError(text)

    for line in path.read_text().splitlines():
        assert json.loads(line, parse_constant=refuse)["step_s_low"] is None

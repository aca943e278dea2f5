"""Disks that are full, small, read-only or no folder at all: one line, exit 2, and every line written before is kept."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ckbench import store
from tests.prove import entry, tool

SWEEP = ("sweep", "study.yaml", "--layers", "2..4", "--rounds", "3")
RUN = (*SWEEP, "--device", "replay:script.json")


def can_mount() -> bool:
    """Tell whether this user may mount a file system in a private namespace."""
    if shutil.which("unshare") is None:
        return False
    probe = "mount -t tmpfs tmpfs /mnt"
    return subprocess.run(["unshare", "-Urm", "sh", "-c", probe], capture_output=True).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="may not mount a file system in a namespace of its own")


def on_tmpfs(folder: Path, options: str, *arguments: str) -> tuple[int, str, str]:
    """Run the tool with its results folder on a small file system, then copy to ``kept`` what it left there."""
    (folder / "results").mkdir()
    command = " ".join([sys.executable, "-m", "ckbench", *arguments])
    script = f"mount -t tmpfs -o {options} tmpfs results && {{ {command}; code=$?; cp -r results kept; exit $code; }}"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script], cwd=folder, env=tool.environment(), capture_output=True, text=True, timeout=120
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@needs_mount
def test_a_full_disk_is_found_before_the_first_trial(tmp_path: Path) -> None:
    tool.write_study(tmp_path)
    code, out, err = on_tmpfs(tmp_path, "size=16k", *RUN)
    assert (code, out, err) == (2, "", "results: cannot be written (No space left on device)\n")
    assert not list(tmp_path.rglob("*.jsonl"))


@needs_mount
def test_a_disk_that_fills_up_keeps_every_whole_line(tmp_path: Path) -> None:
    tool.write_study(tmp_path)
    code, out, err = on_tmpfs(tmp_path, "size=100k", *RUN)
    *trials, last = err.splitlines()
    assert code == 2 and out == ""
    assert last.endswith(".jsonl: cannot be written (No space left on device); record not kept")
    (file,) = (tmp_path / "kept").glob("*.jsonl")
    data = file.read_bytes()
    assert data.endswith(b"\n") and 50_000 < len(data) <= 100 * 2**10
    assert len(store.read(file)[0]) == len(data.splitlines()) >= len(trials) - 1
    shutil.copytree(tmp_path / "kept", tmp_path / "roomy" / "results")
    tool.write_study(tmp_path / "roomy")
    code, _, err = tool.finish(tmp_path / "roomy", *SWEEP, "--resume")
    assert code == 0 and " are there from before" in err


@needs_mount
def test_a_read_only_disk_is_found_before_the_first_trial(tmp_path: Path) -> None:
    tool.write_study(tmp_path)
    code, out, err = on_tmpfs(tmp_path, "ro", *RUN)
    assert (code, out, err) == (2, "", "results: cannot be written (Read-only file system)\n")


@pytest.mark.parametrize("limit", tool.some(1, (20, 0), (90, 10)), ids=str)
def test_a_limit_on_file_sizes(tmp_path: Path, limit: tuple[int, int]) -> None:
    """Like a full disk, where nothing may be mounted; a write may go through in part."""
    limit_kib, n_least = limit
    tool.write_study(tmp_path)
    script = f"ulimit -f {limit_kib}; exec {' '.join([sys.executable, '-m', 'ckbench', *RUN])}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=tool.environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.endswith(("cannot be written (File too large)", "cannot be written (File too large); record not kept"))
    records = [line for lines in tool.complete_lines(tmp_path).values() for line in lines]
    assert len(records) >= n_least and (n_least or done.stderr.count("\n") == 1)
    assert all(isinstance(json.loads(line), dict) for line in records)
    assert all(path.read_bytes().endswith(b"\n") for path in entry.records_below(tmp_path))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_folder_that_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The same answers, whoever runs the tests: root may write where others may not."""
    tool.write_study(folder)
    real_open = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and "results" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    answer = entry.call(*RUN)
    entry.check_manners(answer)
    assert (answer.code, answer.err) == (2, f"results: cannot be written ({os.strerror(number)})\n")
    assert entry.records_below(Path()) == []


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(folder: Path) -> None:
    tool.write_study(folder)
    Path("results").mkdir(mode=0o555)
    answer = entry.call(*RUN)
    assert (answer.code, answer.err) == (2, "results: cannot be written (Permission denied)\n")


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("script.json", "script.json: is a file, not a results folder"),
        ("script.json/deeper", "script.json/deeper: a parent of it is a file"),
        ("x" * 300, "cannot be written (File name too long)"),
        ("loop", "loop: is a file, not a results folder"),
    ],
    ids=["file", "below a file", "long", "link to itself"],
)
def test_a_results_path_that_is_no_folder(folder: Path, out: str, said: str) -> None:
    tool.write_study(folder)
    Path("loop").symlink_to("loop")
    before = Path("script.json").read_bytes()
    answer = entry.call(*RUN, "--out", out)
    entry.check_manners(answer)
    assert answer.code == 2 and said in answer.err and answer.err.count("\n") == 1
    assert Path("script.json").read_bytes() == before and entry.records_below(Path()) == []


def test_no_room_for_temporary_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*details: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "tmp/ckbench-1")

    tool.write_study(folder, isolated=True)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    answer = entry.call(*RUN)
    entry.check_manners(answer)
    assert (answer.code, answer.err) == (2, "tmp/ckbench-1: No space left on device\n")

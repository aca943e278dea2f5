"""Facts of the host, read from files laid out as the kernel lays them out."""

from pathlib import Path

import pytest

from ckbench import host


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    assert host.available_threads(tmp_path, 8) == 8
    assert host.available_threads(tmp_path) >= 1


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 8), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_quota_of_cgroup_2(tmp_path: Path, quota: str, threads: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert host.available_threads(tmp_path, 8) == threads


@pytest.mark.parametrize(("quota_us", "threads"), [("-1", 8), ("300000", 3), ("150000", 1)])
def test_quota_of_cgroup_1(tmp_path: Path, quota_us: str, threads: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert host.available_threads(tmp_path, 8) == threads


def test_a_quota_nobody_can_read(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("what is this\n")
    assert host.available_threads(tmp_path, 8) == 8


def test_kills_for_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 7\noom_group_kill 0\n")
    assert host.oom_kills(tmp_path) == 7


def test_resident_size_is_in_bytes_on_every_system() -> None:
    assert host.rss_bytes(1000, "linux") == 1_024_000
    assert host.rss_bytes(1000, "darwin") == 1000


def test_facts_are_plain() -> None:
    facts = host.facts()
    assert facts["usable_threads"] >= 1
    assert set(facts) >= {"load_1min", "cpu_count", "usable_threads", "governor"}


def test_the_code_has_a_name_of_its_own() -> None:
    assert host.code_id() == host.code_id()
    assert len(host.code_id()) == 12 and int(host.code_id(), 16) >= 0

"""Facts of the host that bear on a trial: usable threads, load, governor, memory; and a hash of our own code."""

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

BUSY_LOAD_MARGIN = 0.75
"""Load above a trial's own threads from which on other work is taken to have run."""
CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_threads(cgroup_root: Path = CGROUP_ROOT, n_usable: int | None = None) -> int:
    """Count the CPUs this process may use: affinity, then the container's quota rounded down, at least 1.

    Reads ``cpu.max`` (cgroup 2) or ``cpu.cfs_quota_us`` (cgroup 1).
    """
    if n_usable is None:
        affinity = getattr(os, "sched_getaffinity", None)
        n_usable = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _cpu_quota(cgroup_root)
    return n_usable if quota is None else max(1, min(n_usable, int(quota)))


def _cpu_quota(root: Path) -> float | None:
    """Give the container's CPU quota in CPUs; None without one."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu/cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError):
        return None


def pin(n_threads: int) -> list[int] | None:
    """Keep this process on its first ``n_threads`` CPUs; give them, or None where that cannot be done."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    cpus = sorted(os.sched_getaffinity(0))[:n_threads]
    os.sched_setaffinity(0, cpus)
    return cpus


def oom_kills(cgroup_root: Path = CGROUP_ROOT) -> int | None:
    """Give how often the kernel has killed for memory, in this container or on this host; None if unknown."""
    for path, key in ((cgroup_root / "memory.events", "oom_kill"), (Path("/proc/vmstat"), "oom_kill")):
        try:
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value)
        except (OSError, ValueError):
            continue
    return None


def peak_rss_bytes() -> int | None:
    """Give the largest resident size this process has had; None where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    return rss_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sys.platform)


def rss_bytes(raw: int, system: str) -> int:
    """Give ``ru_maxrss`` in bytes: macOS counts bytes, Linux KiB."""
    return raw if system == "darwin" else raw * 1024


def facts() -> dict[str, Any]:
    """Give what may have disturbed timing: load, governor, cores."""
    return {
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "cpu_count": os.cpu_count(),
        "usable_threads": available_threads(),
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "governor": _first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
    }


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return None


@cache
def code_id() -> str:
    """Hash the package's own source, so that records of different code are told apart."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def is_busy(environment: dict[str, Any]) -> bool:
    """Tell whether a trial's machine had other work to do than the trial."""
    load, threads = environment.get("load_1min"), environment.get("threads")
    return isinstance(load, int | float) and isinstance(threads, int) and load > threads + BUSY_LOAD_MARGIN

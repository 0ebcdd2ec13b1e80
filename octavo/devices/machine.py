"""Facts of the machine, whatever computes: CPUs that may be used, memory and disk that are free."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["available_cpus", "free_disk_bytes", "free_memory_bytes"]

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
UNREADABLE = float("inf")


def available_cpus() -> int:
    """CPUs this process may use: its affinity, cut to the tightest CPU quota of its cgroup and those around it."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cpus, *map(_cpu_quota, _own_cgroups("cpu"))])))


def free_memory_bytes() -> int:
    """What this process can still allocate: the machine's available memory, or less where a cgroup has less left."""
    return int(min([_meminfo_available(), *map(_cgroup_memory_left, _own_cgroups("memory"))]))


def free_disk_bytes(folder: str) -> int:
    """What this process may still write in a folder; nothing in one that is not there."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _own_cgroups(controller: str) -> Iterator[Path]:
    """Folders of the cgroups that this process is in, innermost first, of version 2 and of version 1.

    In a container the paths may be the host's, of which only the root is visible: it is the container's own.
    """
    for line in (_read(OWN_CGROUPS) or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP / controller if controllers else CGROUP
        inner = PurePosixPath(path.lstrip("/"))
        yield from (root / folder for folder in (inner, *inner.parents))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> float:
    """The file's number; infinity for a limit that is not set or a file that is not there."""
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else UNREADABLE


def _cpu_quota(cgroup: Path) -> float:
    quota, _, period = (_read(cgroup / "cpu.max") or "max 100000").partition(" ")
    if quota != "max":
        return int(quota) / int(period)
    quota_us, period_us = _number(cgroup / "cpu.cfs_quota_us"), _number(cgroup / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us < UNREADABLE else UNREADABLE


def _cgroup_memory_left(cgroup: Path) -> float:
    """The limit less what is used. Page cache counts as used, but the kernel drops it before it refuses memory."""
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        left = _number(cgroup / limit) - _number(cgroup / usage)
        if abs(left) < UNREADABLE:
            rows = dict(line.split(" ", 1) for line in (_read(cgroup / "memory.stat") or "").splitlines())
            return left + int(rows.get("inactive_file", 0))
    return UNREADABLE


def _meminfo_available() -> int:
    meminfo = _read(Path("/proc/meminfo"))
    if meminfo is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = dict(line.split(":", 1) for line in meminfo.splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024

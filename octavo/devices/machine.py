"""Facts of the machine, whatever computes: CPUs that may be used, memory and disk that are free."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["available_cpus", "free_disk_bytes", "free_memory_bytes"]

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
OWN_SIZES = Path("/proc/self/statm")
MEMINFO = Path("/proc/meminfo")
UNREADABLE = float("inf")


def available_cpus() -> int:
    """CPUs this process may use: its affinity, cut to the tightest CPU quota of its cgroup and those around it."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cpus, *map(_cpu_quota, _own_cgroups("cpu"))])))


def free_memory_bytes() -> int:
    """Bytes that this process can still allocate: what the machine has available, or less where a cgroup or one of the
    process's own limits leaves less."""
    left = [_meminfo_available(), *map(_cgroup_memory_left, _own_cgroups("memory")), *_own_limits_left()]
    return max(int(min(left)), 0)


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
    """The limit less what is used. Pages of files count as used, but the kernel drops them before it refuses memory."""
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        left = _number(cgroup / limit) - _number(cgroup / usage)
        if abs(left) < UNREADABLE:
            rows = dict(line.split(" ", 1) for line in (_read(cgroup / "memory.stat") or "").splitlines())
            own = {name: rows.get(name, "0") for name in ("inactive_file", "active_file")}
            # Version 1 counts a cgroup's children apart, as it does not in the usage.
            return left + sum(int(rows.get(f"total_{name}", value)) for name, value in own.items())
    return UNREADABLE


def _own_limits_left() -> Iterator[float]:
    """What `ulimit -v` and `ulimit -d` leave of the address space and of private memory."""
    # In pages: all that is mapped, resident, shared, code, a zero, data and stack.
    sizes = [int(size) * os.sysconf("SC_PAGE_SIZE") for size in (_read(OWN_SIZES) or "").split()]
    for limit, place in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield soft - (sizes[place] if sizes else 0)


def _meminfo_available() -> int:
    meminfo = _read(MEMINFO)
    if meminfo is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = dict(line.split(":", 1) for line in meminfo.splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024

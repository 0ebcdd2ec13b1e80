"""Facts of the machine: CPUs that may be used, memory that is free, and the arithmetic rate of an ops provider."""

import os
import time
from pathlib import Path

import torch

from octavo.kernels.ops import Ops

__all__ = ["available_cpus", "free_memory_bytes", "measure_flops_per_s"]

CGROUP = Path("/sys/fs/cgroup")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def available_cpus() -> int:
    """CPUs this process may use: its affinity, and the container's CPU quota, whichever is smaller."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def _cpu_quota() -> float | None:
    v2 = _read(CGROUP / "cpu.max")
    if v2 is not None:
        limit, _, period = v2.partition(" ")
        return None if limit == "max" else int(limit) / int(period)
    limit_v1, period_v1 = _read(CGROUP / "cpu/cpu.cfs_quota_us"), _read(CGROUP / "cpu/cpu.cfs_period_us")
    if limit_v1 is None or period_v1 is None or int(limit_v1) <= 0:
        return None
    return int(limit_v1) / int(period_v1)


def free_memory_bytes() -> int:
    """What this process can still allocate: the machine's available memory, or the container's limit less its use."""
    free = _meminfo_available()
    for limit_file, usage_file in (
        (CGROUP / "memory.max", CGROUP / "memory.current"),
        (CGROUP / "memory/memory.limit_in_bytes", CGROUP / "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(limit_file), _read(usage_file)
        if limit is not None and usage is not None and limit.isdigit():
            free = min(free, int(limit) - int(usage) + _reclaimable_bytes(limit_file.parent))
    return free


def _meminfo_available() -> int:
    meminfo = _read(Path("/proc/meminfo"))
    if meminfo is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = dict(line.split(":", 1) for line in meminfo.splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024


def _reclaimable_bytes(cgroup: Path) -> int:
    """Page cache that the kernel drops before it refuses memory: counted as use by the cgroup, free to us."""
    rows = dict(line.split(" ", 1) for line in (_read(cgroup / "memory.stat") or "").splitlines() if " " in line)
    return int(rows.get("inactive_file", 0))


def measure_flops_per_s(ops: Ops, hidden_size: int, dtype: torch.dtype, seconds: float = 0.05) -> float:
    """Operations a second of `ops.linear` on 64 rows, the best of what fits in `seconds`."""
    rows, outputs = 64, 2048
    x = torch.ones(rows, hidden_size, dtype=dtype)
    weight = ops.pack(torch.full((outputs, hidden_size), 0.01, dtype=dtype))
    ops.linear(x, weight, None, dtype)
    best = float("inf")
    deadline = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        ops.linear(x, weight, None, dtype)
        end = time.perf_counter()
        best = min(best, end - start)
        if end > deadline:
            return 2 * rows * outputs * hidden_size / best

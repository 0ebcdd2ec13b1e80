"""Facts of the machine: CPUs that may be used, memory that is free, and an ops provider's rates of arithmetic and of
reading memory."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import torch

from octavo.devices.provider import read_timer
from octavo.kernels.ops import Ops
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix

__all__ = [
    "available_cpus",
    "free_disk_bytes",
    "free_memory_bytes",
    "measure_flops_per_s",
    "measure_read_bytes_per_s",
]

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
UNREADABLE = float("inf")
READ_BYTES = 512 << 20
"""Read at most, to measure the rate."""


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


def measure_flops_per_s(
    ops: Ops,
    hidden_size: int,
    dtype: torch.dtype,
    form: QuantizedForm | None = None,
    int8_activations: bool = True,
    seconds: float = 0.05,
) -> float:
    """Operations a second of `ops.linear` on 64 rows, the best of what fits in `seconds`; over a matrix of `form`."""
    rows, outputs = 64, 2048
    x = torch.ones(rows, hidden_size, dtype=dtype)
    if form is None:
        weight = ops.pack(torch.full((outputs, hidden_size), 0.01, dtype=dtype))
    else:
        weight = ops.pack_quantized(QuantizedMatrix.filled(form, outputs, hidden_size), int8_activations)
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


def measure_read_bytes_per_s(provider: str, tensors: Sequence[torch.Tensor], seconds: float = 0.05) -> float | None:
    """Rate at which a provider's threads read these tensors, or the first 512 MB of them: the best of what fits in
    `seconds`. Nothing is allocated. None where the provider can't tell."""
    time_read = read_timer(provider)
    if time_read is None:
        return None
    buffers, num_bytes = [], 0
    for tensor in tensors:
        size = min(tensor.nbytes, READ_BYTES - num_bytes)
        buffers.append((tensor.data_ptr(), size))
        num_bytes += size
    best = float("inf")
    deadline = time.perf_counter() + seconds
    while True:
        best = min(best, time_read(buffers))
        if time.perf_counter() > deadline:
            return num_bytes / best

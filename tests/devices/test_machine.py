"""Facts of the machine, read from files laid out as the kernel lays them out."""

import os
import resource
from pathlib import Path

import pytest

from octavo.devices import machine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "own").write_text("0::/\n")
    return tmp_path / "cgroup"


@pytest.mark.parametrize(("cpu_max", "expected"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1)])
def test_the_containers_cpu_quota_bounds_the_threads(cgroup: Path, cpu_max: str, expected: int | None) -> None:
    (cgroup / "cpu.max").write_text(cpu_max + "\n")
    assert machine.available_cpus() == (expected or len(os.sched_getaffinity(0)))


def test_the_tightest_quota_around_the_process_counts(cgroup: Path) -> None:
    (cgroup / "a.slice/b.scope").mkdir(parents=True)
    (cgroup.parent / "own").write_text("0::/a.slice/b.scope\n")
    (cgroup / "a.slice/cpu.max").write_text("100000 100000\n")
    (cgroup / "a.slice/b.scope/cpu.max").write_text("max 100000\n")
    assert machine.available_cpus() == 1


def test_an_old_cgroups_cpu_quota_counts_too(cgroup: Path) -> None:
    (cgroup.parent / "own").write_text("4:cpu,cpuacct:/somewhere/on/the/host\n3:memory:/\n")
    (cgroup / "cpu").mkdir()
    (cgroup / "cpu/cpu.cfs_quota_us").write_text("100000\n")
    (cgroup / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert machine.available_cpus() == 1
    (cgroup / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert machine.available_cpus() == len(os.sched_getaffinity(0))


def test_the_containers_memory_limit_bounds_what_is_free(cgroup: Path) -> None:
    unlimited = machine.free_memory_bytes()
    (cgroup / "memory.max").write_text(f"{1 << 30}\n")
    (cgroup / "memory.current").write_text(f"{700 << 20}\n")
    (cgroup / "memory.stat").write_text(f"anon {100 << 20}\ninactive_file {200 << 20}\n")
    assert machine.free_memory_bytes() == (1024 - 700 + 200) << 20 < unlimited
    (cgroup / "memory.max").write_text("max\n")
    assert machine.free_memory_bytes() == pytest.approx(unlimited, rel=0.2)


@pytest.mark.parametrize(
    "stat",
    [
        f"anon {100 << 20}\ninactive_file {200 << 20}\nactive_file {300 << 20}\n",
        f"inactive_file 0\nactive_file 0\ntotal_inactive_file {200 << 20}\ntotal_active_file {300 << 20}\n",
    ],
    ids=["version 2", "version 1"],
)
def test_memory_that_only_caches_files_is_free(cgroup: Path, stat: str) -> None:
    (cgroup / "memory.max").write_text(f"{1 << 30}\n")
    (cgroup / "memory.current").write_text(f"{700 << 20}\n")
    (cgroup / "memory.stat").write_text(stat)
    assert machine.free_memory_bytes() == (1024 - 700 + 200 + 300) << 20


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_the_process_s_own_limits_bound_what_is_free(limit: int) -> None:
    soft, hard = resource.getrlimit(limit)
    pages = [int(number) for number in Path("/proc/self/statm").read_text().split()]
    used = pages[0 if limit == resource.RLIMIT_AS else 5] * resource.getpagesize()
    resource.setrlimit(limit, (used + (256 << 20), hard))
    try:
        assert 0 < machine.free_memory_bytes() <= 257 << 20
    finally:
        resource.setrlimit(limit, (soft, hard))


def test_a_machine_without_proc_is_measured_by_its_pages(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMINFO", "OWN_SIZES", "OWN_CGROUPS"):
        monkeypatch.setattr(machine, name, cgroup / "nothing")
    assert machine.free_memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.available_cpus() == len(os.sched_getaffinity(0))

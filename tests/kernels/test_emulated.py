"""Every op on CPUs that this machine is not: octavo_check (csrc/cpu/tests/check.cpp) under qemu-user."""

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # cmake and ninja are installed beside Python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # it compiles two instruction sets and emulates them
    pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates old x86-64 CPUs and aarch64 on x86-64"),
]


@dataclass(frozen=True, slots=True)
class Report:
    isas: list[str]  # best first
    digests: dict[str, str]  # case -> what the scalar form wrote
    different: list[str]  # cases in which another instruction set wrote something else


def require(tool: str, package: str) -> None:
    if not shutil.which(tool, path=PATH):
        pytest.fail(f"{tool} is not installed. On Debian: apt install {package}", pytrace=False)


def built_check(machine: str, *options: str) -> Path:
    """Compiles octavo_check, or what has changed of it since the last time."""
    folder, environment = ROOT / "build" / f"check-{machine}", {**os.environ, "PATH": PATH}
    settings = ["-DCMAKE_BUILD_TYPE=Release", "-DOCTAVO_MODULE=OFF", *options]
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), *settings]
    for command in (configure, ["cmake", "--build", str(folder), "--target", "octavo_check"]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "octavo_check"


def run(*command: str | Path) -> Report:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr
    first, *cases, _total = done.stdout.splitlines()
    isas = first.removeprefix("instruction sets:").split()
    digests = {name: digest for digest, name in (line.split(" DIFFERENT")[0].split(maxsplit=1) for line in cases)}
    different = [line for line in cases if "DIFFERENT" in line]
    assert len(digests) == len(cases) > 100
    assert bool(different) == (done.returncode == 1)
    return Report(isas, digests, different)


def uses_f16c(case: str) -> bool:
    """QEMU 7.2 flushes subnormal halves in F16C's conversions, which CPUs do not: there it can't judge AVX2."""
    return "f16" in case or "cache f8" in case or ("quantised" in case and "wide" not in case)


@pytest.fixture(scope="module")
def native_check() -> Path:
    return built_check("x86_64")


@pytest.fixture(scope="module")
def native(native_check: Path) -> Report:
    """Of this CPU's instruction sets, which agree."""
    report = run(native_check)
    assert report.different == []
    return report


@pytest.mark.parametrize(
    ("cpu", "isas"), [("Haswell", ["avx2", "scalar"]), ("Nehalem", ["scalar"]), ("core2duo", ["scalar"])]
)
def test_an_older_cpu_runs_what_it_has_and_writes_the_same_bits(
    cpu: str, isas: list[str], native_check: Path, native: Report
) -> None:
    require("qemu-x86_64", "qemu-user")
    old = run("qemu-x86_64", "-cpu", cpu, native_check)
    assert old.isas == isas
    assert old.digests == native.digests
    assert [case for case in old.different if not uses_f16c(case)] == []


def test_aarch64_has_neon_which_equals_its_scalar_twin_and_x86(native: Report) -> None:
    require("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    require("qemu-aarch64", "qemu-user")
    check = built_check("aarch64", f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/csrc/aarch64-linux-gnu.cmake")
    arm = run("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", check)
    assert arm.isas == ["neon", "scalar"]
    assert arm.digests == native.digests
    assert arm.different == []

"""A wheel, built from what is tracked and installed into an environment of its own, works outside the source tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from octavo.devices.cpu import _cpu
from tests.smollm2 import gguf_path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
GENERATE = """
import sys
from octavo import LLM, SamplingParams
import octavo.devices.cpu._cpu as native
print(native.__file__)
print(native.supported_isas())
llm = LLM(sys.argv[1], max_model_len=256)
(output,) = llm.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0))
print(output.outputs[0].text)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # it compiles every instruction set


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """What the command prints, without the environment of these tests."""
    path = f"{BIN}:{os.environ['PATH']}"  # cmake and ninja are installed beside Python
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env={**clean, "PATH": path, **environment}, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is tracked."""
    source = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", folder=ROOT).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    cached = {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CCACHE_BASEDIR": str(source), "CCACHE_NOHASHDIR": "1"}
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source]
    run(*build, folder=out, **(cached if shutil.which("ccache") else {}))
    (path,) = out.glob("octavo-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which sees what these tests have installed behind its own packages."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, folder=folder)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_a_wheel_has_the_package_and_nothing_else(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        contents = {name: archive.read(name) for name in names}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"octavo"}
    tracked = {str(path.relative_to(source)) for path in source.glob("octavo/**/*.*")}
    (extension,) = {name for name in names if name.startswith("octavo/")} - tracked
    assert extension.startswith("octavo/devices/cpu/_cpu.")
    assert tracked <= set(names)
    for folder in (ROOT, source, sys.base_prefix):  # nothing of where it was built
        assert [name for name, content in contents.items() if str(folder).encode() in content] == []


def test_an_installed_wheel_generates_outside_the_source_tree(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "bin" / "octavo", "--version", folder=tmp_path).startswith("octavo 0.")
    python = installed / "bin" / "python"
    native, isas, *text = run(python, "-W", "ignore", "-c", GENERATE, gguf_path(), folder=tmp_path).splitlines()
    assert native.startswith(str(installed))
    assert isas == str(_cpu.supported_isas())
    assert "Paris" in "\n".join(text)

"""The package as a whole: its public names, what importing it loads, its version and pins."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(part: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{part}.txt").read_text().splitlines()
    found = [re.fullmatch(r"([\w-]+)==([\w.]+)", line) for line in lines if line and not line.startswith("#")]
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def test_every_public_name_can_be_had() -> None:
    assert {name: getattr(octavo, name).__name__ for name in octavo.__all__ if name != "__version__"} == {
        name: name for name in octavo.__all__ if name != "__version__"
    }
    assert set(octavo.__all__) <= set(dir(octavo))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = octavo.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("use", ["octavo", "octavo; octavo.SamplingParams; octavo.EngineConfig; octavo.ConfigError"])
def test_importing_octavo_does_not_import_torch(use: str) -> None:
    script = f"import sys, {use}\nprint(*({{'torch', 'numpy', 'fastapi', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"


def test_the_version_is_the_projects() -> None:
    assert octavo.__version__ == PROJECT["project"]["version"]
    assert f"## {octavo.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_typed() -> None:
    assert (ROOT / "octavo" / "py.typed").exists()


def test_every_dependency_is_pinned() -> None:
    project = PROJECT["project"]
    for part, requirements in (
        ("runtime", project["dependencies"]),
        ("test", project["optional-dependencies"]["dev"]),
        ("build", PROJECT["build-system"]["requires"]),
    ):
        names = {re.split(r"[<>=]", requirement)[0].lower().replace("_", "-") for requirement in requirements}
        assert names - {"torch"} <= set(pins(part)) | set(pins("build")), part


def test_the_entry_point_of_vllms_users_is_the_same_command() -> None:
    command = [sys.executable, "-m", "octavo.entrypoints.openai.api_server", "--model", "m", "--block-size", "1"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == "octavo: error: --block-size must be a positive multiple of 16, got 1.\n"

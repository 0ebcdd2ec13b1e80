"""The command answers at once, and imports nothing slow to do so."""

import subprocess
import sys
import time

import pytest

from octavo import __version__

SLOW = ("torch", "fastapi", "uvicorn", "transformers", "jinja2", "numpy", "tokenizers", "asyncio")


@pytest.mark.parametrize("options", [("--help",), ("--version",)])
def test_help_and_version_take_under_0_3_s(options: tuple[str, ...]) -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        output = subprocess.run([sys.executable, "-m", "octavo", *options], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
        assert "octavo" in output.stdout
    assert min(seconds) < 0.3  # the best of them: others may be using the machine


@pytest.mark.parametrize(
    "options", [("--help",), ("serve", "--help"), ("bench", "--help"), ("bench", "serve", "--help")]
)
def test_help_imports_nothing_slow(options: tuple[str, ...]) -> None:
    script = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(*(set({SLOW!r}) & set(sys.modules)), file=sys.stderr))\n"
        f"from octavo.cli.main import main\nmain({list(options)!r})\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stderr.strip() == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from octavo.cli.main import main

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"octavo {__version__}\n"

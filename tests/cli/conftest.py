"""Fixtures of the command line's tests."""

from collections.abc import Callable, Iterator

import pytest

from octavo.cli.main import main
from tests.cli.fake_server import FakeServer, running

Fails = Callable[..., str]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run a command line that must end with an exit status; returns its error output."""

    def run(*argv: str, status: int = 2) -> str:
        try:
            found: object = main(argv)
        except SystemExit as end:
            found = end.code
        assert found == status
        return capsys.readouterr().err

    return run

"""How the suite is spread over processes (`pytest -n 2`), and on which device engines in a test's process compute."""

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TIMED = ("tests/cli/", "tests/engine/", "tests/server/")
"""What measures time or kills processes: one after the other, in one process."""


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """The tests of a file stay together, for the sake of its fixtures."""

    def _split_scope(self, nodeid: str) -> str:
        return "timed" if nodeid.startswith(TIMED) else nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """OCTAVO_TEST_BACKEND, a value of --attention-backend, stands for whatever tests ask for."""
    backend = os.environ.get("OCTAVO_TEST_BACKEND")
    if backend is not None:
        from octavo.engine import startup

        make_device = startup.open_device
        startup.open_device = lambda option="auto": make_device(backend)

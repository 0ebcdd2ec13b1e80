"""`octavo bench startup`'s measurement of one start, with a script in the server's place."""

import sys
from pathlib import Path

import pytest

from octavo.cli.bench.server_start import MILESTONES, measure_start
from octavo.errors import OctavoError

SERVER = """
import sys, threading
from tests.cli.fake_server import FakeServer, running
with running(FakeServer(), int(sys.argv[1].removeprefix("--port="))):
    print("octavo serves fake, ready in 0.10 s")
    print("  engine: imports 1.25 s, load weights 0.50 s; beside it: tokenizer 0.11 s", flush=True)
    threading.Event().wait()
"""


def test_milestones_come_in_order_and_stages_are_read_from_the_log() -> None:
    start = measure_start([sys.executable, "-c", SERVER], timeout_s=30)
    assert tuple(start.seconds) == MILESTONES
    assert 0 < start.seconds["port open"] <= start.seconds["ready"] <= start.seconds["first token"]
    assert start.stages == {"imports": 1.25, "load weights": 0.5, "tokenizer": 0.11}


def test_a_server_that_ends_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(OctavoError, match=r"(?s)ended with status 3 before: port open.*no such model"):
        measure_start([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], timeout_s=30)


def test_a_server_that_is_never_ready_is_an_error() -> None:
    with pytest.raises(OctavoError, match=r"not ready within --start-timeout 0.2 seconds"):
        measure_start([sys.executable, "-c", "import threading; threading.Event().wait()"], timeout_s=0.2)

"""The probes: 503 when the engine does not get on, and only then."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from octavo.ipc.pulse import SILENT_S, STALLED_S
from tests.server.running import RunningServer, scripted

TEXT = "/v1/completions"


def begin(server: RunningServer, prompt: str) -> None:
    """Leave a request running; its step does not end with the client."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + TEXT, json={"prompt": prompt}, timeout=0.3)


def seconds_until(is_true: Callable[[], bool], limit_s: float) -> float:
    start = time.monotonic()
    while not is_true():
        assert time.monotonic() - start < limit_s
        time.sleep(0.05)
    return time.monotonic() - start


def test_a_stopped_engine_is_told_within_five_seconds_and_a_long_step_is_not(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder).wait_ready() as server, httpx.Client(base_url=server.url) as http:
        begin(server, "<hang>x")
        end = time.monotonic() + SILENT_S + 0.5
        while time.monotonic() < end:
            assert http.get("/health").status_code == 200
            time.sleep(0.1)
        server.engine.send_signal(signal.SIGSTOP)
        seconds_until(lambda: http.get("/health").status_code == 503, 5)
        answer = http.get("/health").json()
        assert answer["status"] == "engine stalled"
        assert "no sign of life" in answer["detail"]
        assert [http.get(path).status_code for path in ("/ping", "/livez")] == [503, 503]
        server.engine.send_signal(signal.SIGCONT)
        seconds_until(lambda: http.get("/health").status_code == 200, 2)
        assert http.get("/livez").status_code == 200
        server.engine.send_signal(signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0  # a stopped engine does not keep the server from ending


@pytest.mark.slow
def test_a_healthy_step_of_a_minute_leaves_the_server_healthy(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder).wait_ready() as server, httpx.Client(base_url=server.url) as http:
        begin(server, "<hang><slow>x")
        end = time.monotonic() + 62
        while time.monotonic() < end:
            assert http.get("/health").status_code == 200
            time.sleep(0.2)
        answer = http.post(TEXT, json={"prompt": "<say>x"})
        assert answer.json()["choices"][0]["text"] == "x"


@pytest.mark.slow
def test_a_step_that_does_not_get_on_is_told_until_it_does(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder).wait_ready() as server, httpx.Client(base_url=server.url) as http:
        begin(server, "<hang>x")
        taken_s = seconds_until(lambda: http.get("/health").status_code == 503, STALLED_S + 5)
        assert taken_s > STALLED_S - 5
        assert "no progress" in http.get("/health").json()["detail"]
        seconds_until(lambda: http.get("/health").status_code == 200, 60 - STALLED_S + 5)

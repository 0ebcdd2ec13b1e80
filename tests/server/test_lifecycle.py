"""A server's life: before it is ready, drained, killed, and without its engine."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.running import RunningServer, scripted
from tests.server.sse import events_of

TEXT = "/v1/completions"
SLOW = {"prompt": "<slow>" + "<say>" + "x" * 60, "max_tokens": 100, "stream": True}


@contextmanager
def stream(server: RunningServer, **fields: object) -> Iterator[Iterator[str]]:
    """The events of a running stream, its first already taken."""
    with httpx.Client(timeout=30) as http, http.stream("POST", server.url + TEXT, json=SLOW | fields) as response:
        assert response.status_code == 200
        events = events_of(response)
        next(events)
        yield events


def engine_folder(server: RunningServer) -> Path:
    """Where the two processes meet: found by the socket that the server listens on."""
    (path,) = {c.laddr for c in psutil.Process(server.process.pid).net_connections("unix") if "octavo-" in str(c.laddr)}
    return Path(str(path)).parent


def test_before_it_is_ready_requests_are_told_to_come_back(tokenizer_folder: Path, tmp_path: Path) -> None:
    signal_file = tmp_path / "go"
    with scripted(tokenizer_folder, start=str(signal_file)) as server, httpx.Client(base_url=server.url) as http:
        response = http.get("/health")
        assert response.status_code == 503
        assert response.json() == {"status": "starting", "model": "scripted"}
        assert http.get("/livez").status_code == 200
        response = http.post(TEXT, json={"prompt": "x"})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert "loading scripted" in response.json()["error"]["message"]
        signal_file.touch()
        server.wait_ready()
        assert http.get("/health").json() == {"status": "ok", "model": "scripted"}
        assert http.get("/ping").status_code == 200
        assert http.post(TEXT, json={"prompt": "<say>x"}).json()["choices"][0]["text"] == "x"
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert server.wait_for("^loaded")[0]
        assert server.lines[-1] == "loaded []"


def test_a_signal_during_the_start_ends_it(tokenizer_folder: Path, tmp_path: Path) -> None:
    with scripted(tokenizer_folder, start=str(tmp_path / "never")) as server:
        httpx.get(server.url + "/health")
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit() == 0


def test_a_port_in_use_is_one_line(server: RunningServer, tokenizer_folder: Path) -> None:
    port = server.url.rpartition(":")[2]
    with scripted(tokenizer_folder, "--port", port) as second:
        assert second.wait_exit() == 1
        assert second.lines[0].startswith(f"octavo: can't listen on 127.0.0.1, port {port}: Address already in use.")
        assert second.lines[1:] == ["loaded []"]


def test_an_engine_that_can_not_start_is_one_line(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder, start="fail") as server:
        assert server.wait_exit() == 1
        assert server.lines[1:] == ["octavo: --max-model-len 9 is too much for this fake.", "loaded []"]


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    with scripted(tmp_path) as server:
        assert server.wait_exit() == 1
        assert len(server.lines) == 3
        assert server.lines[1].startswith("octavo: ")
        assert "tokenizer" in server.lines[1]


def test_a_killed_engine_fails_its_streams_and_ends_the_server(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder).wait_ready() as server:
        with stream(server) as first, stream(server, n=3) as second:
            server.engine.kill()
            for events in (first, second):
                *_, error, done = events
                assert done == "[DONE]"
                assert json.loads(error)["error"]["message"] == "The engine process was killed by signal 9."
        response = httpx.get(server.url + "/health")
        assert response.status_code == 503
        assert response.json()["status"] == "engine dead"
        assert httpx.post(server.url + TEXT, json={"prompt": "x"}).status_code == 503
        assert server.wait_exit() == 1
        server.wait_for("^octavo: The engine process was killed by signal 9.")


def test_the_engine_does_not_outlive_a_killed_server(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder).wait_ready() as server:
        engine, folder = server.engine, engine_folder(server)
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + TEXT, json={"prompt": "<hang>x"}, timeout=0.3)
        server.process.kill()
        engine.wait(2)
        assert not folder.exists()


def test_ctrl_c_lets_open_requests_finish(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder).wait_ready() as server:
        engine, folder = server.engine, engine_folder(server)
        with stream(server) as events, httpx.Client(base_url=server.url) as http:
            assert http.get("/health").status_code == 200
            engine.send_signal(signal.SIGINT)  # a terminal sends it to both
            server.process.send_signal(signal.SIGINT)
            while http.get("/health").status_code == 200:
                pass
            assert http.get("/health").json()["status"] == "draining"
            response = http.post(TEXT, json={"prompt": "x"})
            assert response.status_code == 503
            assert "shutting down" in response.json()["error"]["message"]
            *_, last, done = events
            assert json.loads(last)["choices"][0]["finish_reason"] == "stop"
            assert done == "[DONE]"
        assert server.wait_exit() == 0
        assert not engine.is_running()
        assert not folder.exists()


def test_a_drain_waits_for_a_request_that_is_still_being_prepared(tokenizer_folder: Path) -> None:
    body = b'{"prompt": "<say>accepted"}'
    head = f"POST {TEXT} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with scripted(tokenizer_folder).wait_ready() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head.encode() + body[:5])
            assert httpx.get(server.url + "/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            while httpx.get(server.url + "/health").status_code == 200:
                pass
            connection.sendall(body[5:])
            answer = b""
            while b'"accepted"' not in answer and (piece := connection.recv(65536)):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'"accepted"' in answer
        assert server.wait_exit() == 0


def test_a_drain_ends_at_its_deadline_with_an_error(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder, "--shutdown-timeout", "0.2").wait_ready() as server:
        with stream(server) as events:
            server.process.send_signal(signal.SIGTERM)
            *_, error, done = events
            assert json.loads(error)["error"]["message"] == "The server is shutting down."
            assert done == "[DONE]"
        assert server.wait_exit() == 0


def test_a_second_signal_ends_at_once(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder).wait_ready() as server, stream(server, prompt="<slow>x", max_tokens=500):
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(server.url + "/health").status_code == 200:
            pass
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(3) == 128 + signal.SIGTERM


def test_the_listener_is_there_before_anything_is_loaded(tokenizer_folder: Path, tmp_path: Path) -> None:
    with scripted(tokenizer_folder, start=str(tmp_path / "never")) as server:
        host, port = server.url.removeprefix("http://").split(":")
        socket.create_connection((host, int(port)), timeout=1).close()

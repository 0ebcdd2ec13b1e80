"""What surrounds a server may be full, closed, long or small: it serves all the same, or says why not in one line."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.running import ROOT, make_tokenizer_folder, scripted
from tests.server.test_lifecycle import TEXT, engine_folder, stream

SAY = {"prompt": "<say>hello", "max_tokens": 20}
SERVE = [sys.executable, "-m", "tests.server.scripted_server"]


@contextmanager
def started(folder: Path, shell: str = 'exec "$@"', **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server started by a line of shell, whose standard output can be read."""
    command = ["bash", "-c", shell, "bash", *SERVE, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, **options) as process:
        try:
            yield process
        finally:
            for child in psutil.Process(process.pid).children() if process.poll() is None else ():
                child.kill()
            process.kill()


def url_from(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().split("listening on ")[1].partition(",")[0]


def wait_serving(url: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if httpx.get(url + "/health").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    assert httpx.post(url + TEXT, json=SAY).json()["choices"][0]["text"] == "hello"


def full_pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    return reading, writing


def test_a_log_that_nobody_reads_stops_nothing(tokenizer_folder: Path) -> None:
    reading, writing = full_pipe()
    try:
        with started(tokenizer_folder, stderr=writing) as process, httpx.Client() as http:
            url = url_from(process)
            wait_serving(url)
            for _ in range(400):
                assert http.get(url + "/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("shell", ['exec "$@" 2>/dev/full', 'exec "$@" 2>&-', 'exec "$@" 0<&- 2>&-'])
def test_a_log_that_goes_nowhere_stops_nothing(tokenizer_folder: Path, shell: str) -> None:
    with started(tokenizer_folder, shell) as process:
        url = url_from(process)
        assert process.stdout is not None
        process.stdout.close()  # as `| head -1` does
        wait_serving(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_names_that_the_locale_lacks_and_a_temporary_folder_with_a_long_name(tmp_path: Path) -> None:
    folder, long = tmp_path / "Töpfe 😀", tmp_path / ("x" * 120)
    for path in (folder, long):
        path.mkdir()
    make_tokenizer_folder(folder)
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TMPDIR": str(long)}
    with scripted(folder, environment=environment) as server:
        server.wait_ready()
        assert httpx.post(server.url + TEXT, json=SAY).json()["choices"][0]["text"] == "hello"
        assert httpx.get(server.url + "/v1/models").json()["data"][0]["root"] == str(folder)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_few_open_files_serve_a_few_and_fewer_are_one_line(tokenizer_folder: Path) -> None:
    def limit(number: int) -> Any:
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))

    with started(tokenizer_folder, preexec_fn=limit(64)) as process:
        wait_serving(url_from(process))
    with started(tokenizer_folder, preexec_fn=limit(32), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.read().decode().splitlines()
        assert process.wait() == 1
    assert said == [
        "octavo: a process may have 32 files open here, and the server needs 64. Raise the limit (ulimit -n)."
    ]


def test_a_terminal_that_closes_drains_and_other_signals_change_nothing(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder).wait_ready() as server, stream(server) as events:
        for number in (signal.SIGALRM, signal.SIGUSR2):
            server.process.send_signal(number)
        for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM):
            server.engine.send_signal(number)
        server.process.send_signal(signal.SIGHUP)
        *_, last, done = events
        assert json.loads(last)["choices"][0]["finish_reason"] == "stop"
        assert done == "[DONE]"
        assert server.wait_exit() == 0


def test_under_nohup_a_terminal_may_close(tokenizer_folder: Path) -> None:
    with started(tokenizer_folder, 'trap "" HUP; exec "$@"') as process:
        url = url_from(process)
        wait_serving(url)
        process.send_signal(signal.SIGHUP)
        wait_serving(url)


def test_nothing_is_left_of_a_server_that_was_stopped_while_it_began_or_killed(
    tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with tempfile.TemporaryDirectory(prefix="t") as temporary:
        environment = os.environ | {"TMPDIR": temporary}
        for delay_s in (0.0, 0.2, 0.5):
            with started(tokenizer_folder, env=environment) as process:
                url_from(process)
                time.sleep(delay_s)
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == 0
            assert os.listdir(temporary) == []
        (Path(temporary) / "octavo-notes").mkdir()
        with scripted(tokenizer_folder, environment={"TMPDIR": temporary}).wait_ready() as server:
            kept = engine_folder(server)
            with started(tokenizer_folder, env=environment) as second:
                wait_serving(url_from(second))
                assert kept.exists()
                for process_id in (psutil.Process(second.pid).children()[0].pid, second.pid):
                    os.kill(process_id, signal.SIGSTOP)
                for process_id in (psutil.Process(second.pid).children()[0].pid, second.pid):
                    os.kill(process_id, signal.SIGKILL)
                second.wait()
            left = set(os.listdir(temporary)) - {kept.name, "octavo-notes"}
            assert len(left) == 1
            with started(tokenizer_folder, env=environment) as third:
                wait_serving(url_from(third))
                assert not left & set(os.listdir(temporary))
            assert kept.exists()
            assert httpx.post(server.url + TEXT, json=SAY).status_code == 200

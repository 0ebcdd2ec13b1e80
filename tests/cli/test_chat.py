"""`octavo chat` with a running server, and with a model in this process."""

import io
import os
import signal
import threading

import pytest

from octavo.cli.main import main
from tests.cli.conftest import Fails
from tests.cli.fake_server import FakeServer


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What the user types, then Ctrl-D."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_conversation_keeps_its_history(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "hi", "", "and you?")
    assert main(["chat", "--url", server.url + "/v1", "--system", "be kind", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "> Hello there\n> > Hello there\n> \n"
    assert server.bodies[0]["temperature"] == 0
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "and you?"},
    ]


def test_a_quick_question_is_one_exchange(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", server.url, "-q", "hi", "--max-tokens", "5", "--api-key", "k"]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    assert server.bodies == [
        {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5}
    ]
    assert server.authorizations == ["Bearer k"] * 2


class Screen(io.StringIO):
    """Says when the text `awaited` has been printed."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self.awaited = awaited
        self.shown = threading.Event()

    def write(self, text: str) -> int:
        length = super().write(text)
        if self.awaited in self.getvalue():
            self.shown.set()
        return length


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hang_after = 2
    server.after_first = {"hang_after": None}
    type_in(monkeypatch, "hi", "again")
    screen = Screen("Hello")
    monkeypatch.setattr("sys.stdout", screen)

    def interrupt() -> None:
        screen.shown.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(["chat", "--url", server.url]) == 0
    thread.join()
    assert screen.getvalue().splitlines() == ["> Hello (stopped)", "> Hello there", "> "]
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "Hello"}


def test_a_failed_answer_is_one_line_and_the_message_is_taken_back(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.error_after = 1
    server.after_first = {"error_after": None}
    type_in(monkeypatch, "hi", "again")
    assert main(["chat", "--url", server.url]) == 0
    printed = capsys.readouterr()
    assert printed.err == "octavo: error: the engine broke\n"
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "again"}]


def test_a_quick_question_that_fails_has_status_1(server: FakeServer, fails: Fails) -> None:
    server.status = 503
    assert fails("chat", "--url", server.url, "-q", "hi", status=1) == "octavo: error: HTTP 503: the fake refuses\n"


def test_without_a_server_the_address_is_named(fails: Fails) -> None:
    error = fails("chat", "--url", "http://127.0.0.1:1", "-q", "hi", status=1)
    assert error.startswith("octavo: error: No server answers at http://127.0.0.1:1: ")

"""Connection over a fake transport: what the other tests would need thousands of sockets for."""

import asyncio
import json
from typing import Any

from uvicorn import Config
from uvicorn.server import ServerState

from octavo.server.http.connection import ConnectionLimits, connections_within


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True


async def ignoring_app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def make(state: ServerState, **limits: Any) -> tuple[Any, FakeTransport]:
    values = {"max_header_bytes": 1000, "client_timeout_s": 60.0, "max_connections": 2} | limits
    protocol = connections_within(ConnectionLimits(**values))
    connection = protocol(Config(ignoring_app, log_config=None), state, {}, asyncio.get_running_loop())
    transport = FakeTransport()
    connection.connection_made(transport)
    return connection, transport


async def test_a_connection_over_the_limit_is_told_so_until_one_ends() -> None:
    state = ServerState()
    (first, _), (_, kept), (last, refused) = make(state), make(state), make(state)
    assert not kept.is_closed
    assert refused.is_closed
    head, _, body = refused.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert "2 connections" in json.loads(body)["error"]["message"]
    for connection in (first, last):
        connection.connection_lost(None)
    assert not make(state)[1].is_closed


async def test_many_small_requests_in_one_piece_are_no_large_header() -> None:
    connection, transport = make(ServerState())
    connection.data_received(b"GET / HTTP/1.1\r\nA: " + b"x" * 500 + b"\r\n\r\n")
    for _ in range(30):
        connection.data_received(
            b"GET / HTTP/1.1\r\nA: " + b"x" * 500 + b"\r\n\r\n" + b"GET / HTTP/1.1\r\nB: 1\r\n\r\n"
        )
    assert b" 431 " not in transport.written
    assert not transport.is_closed


async def test_a_body_is_no_header() -> None:
    connection, transport = make(ServerState())
    connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(10):
        connection.data_received(b"x" * 10_000)
    assert not transport.is_closed
    connection, transport = make(ServerState())
    connection.data_received(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(5000):
        connection.data_received(b"1\r\nx\r\n")
    assert not transport.is_closed


async def test_an_answer_to_a_refused_client_that_it_does_not_read_is_given_up() -> None:
    connection, transport = make(ServerState(), client_timeout_s=0.01)
    while not transport.is_aborted:
        await asyncio.sleep(0.005)
    assert transport.written.startswith(b"HTTP/1.1 408 ")
    connection.connection_lost(None)


async def test_after_an_answer_stray_line_ends_do_not_keep_a_connection_open() -> None:
    connection, transport = make(ServerState(), client_timeout_s=0.05)
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    while b"200 OK" not in transport.written:
        await asyncio.sleep(0)
    connection.data_received(b"\r\n")
    while not transport.is_closed:
        await asyncio.sleep(0.01)
    assert b" 408 " in transport.written

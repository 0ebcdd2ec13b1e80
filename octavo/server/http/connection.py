"""Connection: one client's connection, cut off when its headers are too long or it is too slow.

uvicorn's protocol over httptools, with the limits that it lacks and errors in OpenAI's shape. Knows no routes.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.server.http.errors import Error, error_body

__all__ = ["ConnectionLimits", "connections_within"]

FRAMING = 8
"""A body in chunks of one byte takes six for each."""
FIRST_PROBE_S, LAST_PROBE_S = 0.001, 5.0
"""Pauses between the probes of a client that has closed its writing side, each four times as long as the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_header_bytes: int
    client_timeout_s: float
    """For a request to arrive whole, and for each 48 KiB of an answer to be read."""
    max_connections: int


class Connection(HttpToolsProtocol):
    """Invariant: `_deadline` runs from a connection's or request's first sign until the request is whole, and while the
    client does not read. At other times the request is being answered, or uvicorn's keep-alive time-out runs.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        self._num_bytes = self._num_header_bytes = self._num_body_bytes = self._num_new_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, f"The server has {self._limits.max_connections} connections open, as many as it can.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        if self._answered is not None:  # with others waiting behind it, it is not uvicorn's `cycle`
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._deadline is None and not self._is_answering:
            self._start_deadline()
        self._num_bytes += len(data)
        self._num_new_bytes = len(data)
        self._feed(data)
        # A header or trailer that has no end yet has not been seen by on_header.
        if self._num_bytes - (1 + FRAMING) * self._num_body_bytes > self._limits.max_header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        self._num_bytes = self._num_new_bytes
        self._num_header_bytes = self._num_body_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_bytes = self._num_new_bytes = 0
        self._stop_deadline()
        super().on_message_complete()
        if not self._is_answering:  # it was answered before it was whole
            self._start_deadline()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has closed its writing side alone still gets its answers. Over TLS there is no such thing."""
        if self.scheme == "https" or not self._is_answering:
            return False
        self.cycle.keep_alive = False
        self._probe(FIRST_PROBE_S)
        return True

    def _probe(self, pause_s: float) -> None:
        """Find out whether a client that has closed its writing side has gone altogether: the kernel of one that has
        answers what is sent with a reset, and the next write then fails. Interim answers change nothing for others."""
        if self.transport.is_closing() or not self._is_answering:
            return
        is_between = not (self.pipeline or self.cycle.response_started)
        if is_between and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(pause_s, self._probe, min(4 * pause_s, LAST_PROBE_S))

    def pause_writing(self) -> None:
        self._start_deadline()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop_deadline()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(400, msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _DelimitedByClose(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def _without_upgrade(self) -> bytes:
        """An offer to change the protocol may be ignored (RFC 9110, section 7.8). The parser can't do that, and has not
        read the body: the head that it gets again, with a fresh parser, has no offer."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.send_400_response("The server is no proxy: it does not answer CONNECT.")
            return b""
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        lines = [method + b" " + self.url + b" HTTP/" + version, *(name + b": " + value for name, value in kept)]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self._limits.max_header_bytes:
            self._refuse_headers()
            raise ValueError  # ends the parser's work; nobody sees it

    def _refuse_headers(self) -> None:
        if not self.transport.is_closing():
            limit = self._limits.max_header_bytes
            self._refuse(431, f"The request's headers have more than {limit} bytes, which is the limit.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless an answer has begun, and close."""
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = error_body(Error(message=message, type=kind))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
        self._start_deadline()  # for the answer to be read

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(self._limits.client_timeout_s, self._on_deadline)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or self.flow.write_paused:
            self.transport.abort()
        else:
            limit = self._limits.client_timeout_s
            self._refuse(408, f"The request took more than {limit:g} s to arrive. --client-timeout sets the limit.")


class _DelimitedByClose:
    """For HTTP/1.0, which knows no chunks: the end of the connection ends an answer whose length is not known."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unframed(message: Message) -> None:
            self._cycle.chunked_encoding = False
            self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unframed)


def connections_within(limits: ConnectionLimits) -> Any:
    """The class of connections for uvicorn's configuration."""
    return partial(Connection, limits=limits)

"""A small OpenAI server in a thread: answers `num_tokens` pieces, or fails as it is told to."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeServer:
    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo", " there"])
    status: int = 200
    break_after: int | None = None
    """Close the connection after so many pieces."""
    error_after: int | None = None
    """Send an error event after so many pieces."""
    hang_after: int | None = None
    """Send nothing more after so many pieces."""
    after_first: dict[str, Any] = field(default_factory=dict)
    """Fields that change after the first request."""
    with_usage: bool = True
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):  # the client went away
                await self._answer(reader, writer)
        finally:
            self.num_open -= 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        self.authorizations.append(headers.get("authorization"))
        path = head[0].split()[1]
        if path == "/health":
            return self._send_json(writer, 200, {})
        if path == "/v1/models":
            return self._send_json(writer, 200, {"data": [{"id": "fake-model"}]})
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        if self.bodies:
            self.__dict__.update(self.after_first)
        self.bodies.append(body)
        if self.status != 200:
            return self._send_json(writer, self.status, {"error": {"message": "the fake refuses"}})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        async for event in self._events(path.endswith("/chat/completions"), body):
            data = event if isinstance(event, bytes) else json.dumps(event).encode()
            chunk = b"data: " + data + b"\n\n"
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
        if self.break_after is None:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return None

    async def _events(self, is_chat: bool, body: dict[str, Any]) -> AsyncIterator[Any]:
        if is_chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        for index, piece in enumerate(self.pieces):
            if index == self.break_after:
                return
            if index == self.error_after:
                yield {"error": {"message": "the engine broke"}}
                return
            if index == self.hang_after:
                await asyncio.sleep(60)
            yield {"choices": [{"index": 0, "finish_reason": None} | self._piece(is_chat, piece)]}
        yield {"choices": [{"index": 0, "finish_reason": "length"} | self._piece(is_chat, "")]}
        if self.with_usage and body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": len(self.pieces), "total_tokens": 7 + len(self.pieces)}
            yield {"choices": [], "usage": usage}
        yield b"[DONE]"

    @staticmethod
    def _piece(is_chat: bool, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if is_chat else {"text": text}

    @staticmethod
    def _send_json(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


@contextmanager
def running(server: FakeServer, port: int = 0) -> Iterator[FakeServer]:
    """Serve on `port`, or a free one, until the block ends."""
    started = threading.Event()
    stop = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        listener = await asyncio.start_server(server.handle, "127.0.0.1", port)
        server.port = listener.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listener.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()

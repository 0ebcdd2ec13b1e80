"""A client for OpenAI servers that costs little per event: asyncio's streams, httptools for HTTP, nothing else.

A benchmark's client shares the machine with the server, so its time per token counts.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.errors import ConfigError, OctavoError

__all__ = ["HttpClient", "ServerError"]

DONE = b"[DONE]"


class ServerError(OctavoError):
    """The server could not be reached, answered with an error, or broke off. `status` is None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _Answer:
    """What httptools' parser calls back: collects the body."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_complete = False
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True

    @property
    def status(self) -> int:
        return int(self.parser.get_status_code())

    def take_lines(self) -> list[bytes]:
        """Whole lines received so far; a partial one stays."""
        end = self.body.rfind(b"\n") + 1
        lines = bytes(self.body[:end]).splitlines()
        del self.body[:end]
        return lines


class HttpClient:
    """One server. Each request has a connection of its own."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """`base_url` may end with /v1, which paths begin with."""
        url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(
                f"{base_url!r} is not the address of a server; it should look like http://127.0.0.1:8000."
            )
        self.is_tls = url.scheme == "https"
        self.host = url.hostname
        self.port = url.port or (443 if self.is_tls else 80)
        self.prefix = url.path.rstrip("/").removesuffix("/v1")
        self.base_url = f"{url.scheme}://{url.netloc}{self.prefix}"
        self.headers = f"Host: {url.netloc.rpartition('@')[2]}\r\nConnection: close\r\nAccept: */*\r\n"
        if api_key:
            self.headers += f"Authorization: Bearer {api_key}\r\n"

    async def get(self, path: str) -> bytes:
        """The body of the answer to a GET. Raises ServerError."""
        return await self._whole("GET", path, b"")

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The body of the answer to a POST of `body` as JSON. Raises ServerError."""
        return await self._whole("POST", path, msgspec.json.encode(body))

    async def _whole(self, method: str, path: str, body: bytes) -> bytes:
        async with aclosing(self._request(method, path, body)) as answers:
            async for answer in answers:
                content = bytes(answer.body)
        return content

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """POST `body` as JSON and yield the data of each server-sent event up to [DONE]. Raises ServerError."""
        async with aclosing(self._request("POST", path, msgspec.json.encode(body))) as answers:
            async for answer in answers:
                for line in answer.take_lines():
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        if data == DONE:
                            return
                        yield data
        raise ServerError(f"{self.base_url}{path} ended its stream without [DONE].")

    async def _request(self, method: str, path: str, body: bytes) -> AsyncGenerator[_Answer, None]:
        """Yield the same answer each time more of it has come; the last time it is complete."""
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.is_tls or None)
        except OSError as error:
            raise ServerError(f"No server answers at {self.base_url}: {error.strerror or error}.") from error
        try:
            writer.write(self._head(method, path, len(body)) + body)
            answer = _Answer()
            while not answer.is_complete:
                data = await reader.read(65536)
                if not data:
                    raise ServerError(f"{self.base_url}{path}: the connection was closed before the answer ended.")
                answer.parser.feed_data(data)
                if answer.status == 200:
                    yield answer
            if answer.status != 200:
                raise ServerError(_error_message(answer), answer.status)
        except (ConnectionError, httptools.HttpParserError) as error:
            raise ServerError(f"{self.base_url}{path}: {error}.") from error
        finally:
            writer.close()

    def _head(self, method: str, path: str, num_bytes: int) -> bytes:
        content = f"Content-Type: application/json\r\nContent-Length: {num_bytes}\r\n" if method == "POST" else ""
        return f"{method} {self.prefix}{path} HTTP/1.1\r\n{self.headers}{content}\r\n".encode()


def _error_message(answer: _Answer) -> str:
    """What an OpenAI error says, else the body's start."""
    body = bytes(answer.body)
    try:
        decoded = msgspec.json.decode(body)
        return f"HTTP {answer.status}: {decoded['error']['message']}"
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"HTTP {answer.status}: {body[:500].decode(errors='replace')}"

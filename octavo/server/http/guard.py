"""Guard: turns away what is not to reach a handler. Requests without a key, bodies that are too large or no JSON.

Knows headers and sizes, not what a body means.
"""

import asyncio
import contextlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import ConfigError
from octavo.server.http.content_encoding import ENCODINGS, Decoder
from octavo.server.http.errors import Error, send_error
from octavo.server.http.health import OPEN_PATHS
from octavo.server.options import ServerConfig

__all__ = ["ApiKeys", "Bodies", "load_keys"]

KEYS_VARIABLE = "OCTAVO_API_KEY"
MAX_HELD = 8
"""Bodies of the greatest size that may be held at once, of all requests together."""
LINGER_S = 1.0
"""How long the rest of a refused body is read and dropped: a client that still sends would miss the answer."""


def load_keys(config: ServerConfig) -> list[str]:
    """The keys of the option, of its files and of the environment. Raises ConfigError for a file without any."""
    keys = os.environ.get(KEYS_VARIABLE, "").split()
    for key in config.api_key:
        keys += _keys_in_file(key.removeprefix("@")) if key.startswith("@") else [key]
    if not all(keys):
        raise ConfigError("--api-key was given an empty key.")
    return keys


def _keys_in_file(path: str) -> list[str]:
    try:
        keys = Path(path).read_text().split()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--api-key @{path}: {error}") from None
    if not keys:
        raise ConfigError(f"--api-key @{path} holds no key.")
    return keys


class ApiKeys:
    """Lets a request pass that bears one of the keys, as `Authorization: Bearer KEY`; every path but the probes'."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS or self._is_known(_bearer(scope)):
            await self._app(scope, receive, send)
            return
        message = "No valid API key: send one as the header Authorization: Bearer KEY."
        error = Error(message=message, type="invalid_request_error", code="invalid_api_key")
        await send_error(send, 401, error, [(b"www-authenticate", b"Bearer")])

    def _is_known(self, given: bytes) -> bool:
        """In a time that does not tell how much of a key is right, nor which of them."""
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return bytes(key.strip()) if scheme.lower() == b"bearer" else b""
    return b""


class Bodies:
    """Lets bodies pass that are JSON and small enough.

    Invariant: `_held_bytes` is the size of what requests have sent so far that are not answered yet.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if int(length) > self._max_bytes:
            await self._refuse(receive, send, 413, self._too_large(length.decode()))
            return
        has_body = length != b"0" or b"transfer-encoding" in headers
        if has_body and not _is_json(headers.get(b"content-type", b"")):
            error = Error(message="Send the header Content-Type: application/json.", type="invalid_request_error")
            await self._refuse(receive, send, 415, error)
            return
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if has_body and encoding != b"identity":
            if encoding not in ENCODINGS:
                shown = encoding.decode("latin-1")
                message = f"Bodies in the encoding {shown!r} can't be read. Send gzip, deflate, or no Content-Encoding."
                error = Error(message=message, type="invalid_request_error")
                await self._refuse(receive, send, 415, error)
                return
            receive = Decoder(receive, encoding.decode(), self._max_bytes)
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            size = len(message.get("body", b""))
            num_bytes += size
            self._held_bytes += size
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._too_large("more"), {"Connection": "close"})
            if self._held_bytes > MAX_HELD * self._max_bytes:
                error = Error(message="Too many large requests at once.", type="server_error", code="engine_busy")
                raise HTTPException(503, error, {"Connection": "close", "Retry-After": "1"})
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= num_bytes

    def _too_large(self, size: str) -> Error:
        limit = self._max_bytes
        message = f"The body has {size} bytes; the limit is {limit}, which --max-body-bytes sets."
        return Error(message=message, type="invalid_request_error", code="request_too_large")

    async def _refuse(self, receive: Receive, send: Send, status: int, error: Error) -> None:
        await send_error(send, status, error, [(b"connection", b"close")], is_last=False)
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while num_bytes < self._max_bytes:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body"):
                        break
        await send({"type": "http.response.body", "body": b""})


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))

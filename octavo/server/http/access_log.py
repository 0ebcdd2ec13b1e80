"""AccessLog: gives every request its id, and writes a line about it when it has been answered.

The outermost layer of the application. Knows of an answer only its status, and the usage that a handler leaves behind.
"""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["AccessLog", "open_log", "request_id_of", "tell_usage"]

HEADER = b"x-request-id"
CLIENT_GONE = 499
"""nginx's status for a client that went away before an answer began."""
_fine_id = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}").fullmatch
_logger = logging.getLogger("octavo.access")


def request_id_of(scope: Scope) -> str:
    """The request's id: the client's own X-Request-Id where it sent a fitting one."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def tell_usage(scope: Scope, num_prompt_tokens: int, num_output_tokens: int) -> None:
    """For the request's line in the log."""
    scope["state"]["usage"] = (num_prompt_tokens, num_output_tokens)


def open_log(format: str) -> None:
    """Set up where lines go: to standard error with the rest as text, alone as JSON, or nowhere."""
    _logger.disabled = format == "off"
    if format == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        _logger.addHandler(handler)
        _logger.propagate = False


class AccessLog:
    """`count` is told the method, the route's path and the status of each answer."""

    def __init__(self, app: ASGIApp, format: str, count: Callable[[str, str, int], None]) -> None:
        self._app = app
        self._count = count
        self._line = _json_line if format == "json" else _text_line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = CLIENT_GONE
        start = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._count(scope["method"], getattr(scope.get("route"), "path", "none"), status)
            if _logger.isEnabledFor(logging.INFO):
                _logger.info(self._line(_fields(scope, status, time.perf_counter() - start)))


def _request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return given.decode() if _fine_id(given) else uuid.uuid4().hex


def _fields(scope: Scope, status: int, duration_s: float) -> dict[str, Any]:
    num_prompt_tokens, num_output_tokens = scope["state"].get("usage", (None, None))
    host, port = scope.get("client") or ("", 0)
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "client": f"{host}:{port}",
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "duration_s": round(duration_s, 6),
        "request_id": scope["state"]["request_id"],
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
    }


def _json_line(fields: dict[str, Any]) -> str:
    return json.dumps(fields)


def _text_line(fields: dict[str, Any]) -> str:
    # ascii() keeps a path from breaking the line.
    line = "{client} {method} {path!a} {status} {duration_s:.3f} s {request_id}".format_map(fields)
    if fields["prompt_tokens"] is None:
        return line
    return line + " {prompt_tokens}+{completion_tokens} tokens".format_map(fields)

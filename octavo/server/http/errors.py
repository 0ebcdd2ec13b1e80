"""Errors in OpenAI's shape: which status, type and code each of ours has."""

import logging
from collections.abc import Sequence
from http import HTTPStatus

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Send

from octavo.errors import (
    EngineBusyError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    OctavoError,
    RequestFailedError,
    RequestTimeoutError,
)

__all__ = [
    "Error",
    "ErrorBody",
    "describe",
    "error_body",
    "install_error_handlers",
    "model_not_found",
    "not_serving",
    "send_error",
]

logger = logging.getLogger(__name__)
MAX_SHOWN = 100
"""Characters of a rejected value that an error message repeats."""


class Error(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: Error


def describe(error: Exception) -> tuple[int, Error]:
    """The status and the body's content for an error; one that isn't ours is not explained to the client."""
    match error:
        case InvalidRequestError():
            status = 404 if isinstance(error, ModelNotFoundError) else 400
            return status, Error(
                message=error.message, type="invalid_request_error", param=error.param, code=error.code
            )
        case EngineBusyError():
            return 429, Error(message=str(error), type="rate_limit_error", code="engine_busy")
        case EngineDeadError():
            return 503, Error(message=str(error), type="server_error", code="engine_dead")
        case RequestTimeoutError():
            return 504, Error(message=str(error), type="server_error", code="request_timeout")
        case RequestFailedError():
            return 500, Error(message=str(error), type="server_error", code="request_failed")
    return 500, Error(message="Internal server error; the server's log has the details.", type="server_error")


def model_not_found(asked: str, served: str) -> ModelNotFoundError:
    shown = ascii(asked[:MAX_SHOWN]) + ("..." if len(asked) > MAX_SHOWN else "")
    message = f"The model {shown} does not exist. This server serves {served!r}."
    return ModelNotFoundError(message, param="model", code="model_not_found")


def not_serving(why: str, retry_after_s: int) -> HTTPException:
    """The server is alive but takes no requests: it starts, or it drains."""
    error = Error(message=why, type="server_error", code="not_serving")
    return HTTPException(503, detail=error, headers={"Retry-After": str(retry_after_s)})


def error_body(error: Error) -> bytes:
    return msgspec.json.encode(ErrorBody(error))


async def send_error(
    send: Send, status: int, error: Error, headers: Sequence[tuple[bytes, bytes]] = (), *, is_last: bool = True
) -> None:
    """For code outside the handlers. `is_last=False` leaves the answer to be ended by an empty last piece."""
    body = error_body(error)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _response(status: int, error: Error, headers: dict[str, str] | None = None) -> Response:
    return Response(error_body(error), status, headers, media_type="application/json")


def _on_octavo_error(request: Request, error: Exception) -> Response:
    status, body = describe(error)
    headers = {"Retry-After": f"{max(1, round(error.retry_after_s))}"} if isinstance(error, EngineBusyError) else None
    return _response(status, body, headers)


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    headers = dict(error.headers or {})
    if isinstance(error.detail, Error):
        return _response(error.status_code, error.detail, headers)
    phrase = HTTPStatus(error.status_code).phrase
    message = error.detail if error.detail != phrase else f"{phrase}: {request.method} {request.url.path}"
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return _response(error.status_code, Error(message=message, type=kind), headers)


def _on_any_error(request: Request, error: Exception) -> Response:
    status, body = describe(error)
    return _response(status, body)


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(OctavoError, _on_octavo_error)
    app.add_exception_handler(StarletteHTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_any_error)

"""What handlers are given (the service, the ready model, the request's id), and the check of a request's fields."""

import json
import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import Depends, Request, Response

from octavo.errors import InvalidRequestError
from octavo.server.http.access_log import request_id_of
from octavo.server.http.errors import model_not_found
from octavo.server.requests.fields import ApiRequest
from octavo.server.served_model import ServedModel
from octavo.server.service import TheService

__all__ = ["BodySize", "Header", "RequestId", "TheModel", "check_fields", "check_unicode", "json_answer"]

Header = tuple[bytes, bytes]
MAX_WARNED_FIELDS = 10


def _ready_model(service: TheService) -> ServedModel:
    return service.ready_model()


def _request_id(request: Request) -> str:
    return request_id_of(request.scope)


TheModel = Annotated[ServedModel, Depends(_ready_model)]


async def _body_size(request: Request) -> int:
    return len(await request.body())


async def check_unicode(request: Request) -> None:
    """Raises InvalidRequestError for a lone surrogate: JSON can escape one, but no text holds it."""
    if not _escaped_surrogate(await request.body()):
        return
    body = await request.json()
    for name, value in body.items() if isinstance(body, dict) else (("body", body),):
        if (surrogate := _lone_surrogate([name, value])) is not None:
            shown = name.encode("ascii", "backslashreplace").decode()[:64]
            raise InvalidRequestError(
                f"{shown} is not valid Unicode: it has a lone surrogate, U+{ord(surrogate):04X}.", param=shown
            )


def _lone_surrogate(value: object) -> str | None:
    values = [value]
    while values:
        match values.pop():
            case str(text):
                if (found := _surrogate(text)) is not None:
                    return found[0]
            case list(items):
                values += items
            case dict(members):
                values += members.keys()
                values += members.values()
    return None


_escaped_surrogate = re.compile(rb"\\u[dD][89a-fA-F]").search
_surrogate = re.compile("[\ud800-\udfff]").search

RequestId = Annotated[str, Depends(_request_id)]
BodySize = Annotated[int, Depends(_body_size)]
"""Bytes."""


def check_fields(body: ApiRequest, model: ServedModel) -> list[Header]:
    """Headers that warn of fields. Raises for another model, and for fields that octavo can't serve."""
    if body.model is not None and body.model not in model.names:
        raise model_not_found(body.model, model.name)
    headers = [(b"x-octavo-warning", text.encode("ascii")) for text in body.warnings()]
    if unknown := body.unknown_fields():
        # JSON's escapes keep control characters out of the header.
        names = ", ".join(json.dumps(name[:64]) for name in unknown[:MAX_WARNED_FIELDS])
        if model.is_strict:
            raise InvalidRequestError(f"Unknown fields, which --strict refuses: {names}.", param=unknown[0][:64])
        headers.append((b"x-octavo-warning", f"unknown fields ignored: {names}".encode("ascii")))
    return headers


def json_answer(content: msgspec.Struct, headers: Sequence[Header] = ()) -> Response:
    text_headers = {name.decode(): value.decode() for name, value in headers}
    return Response(msgspec.json.encode(content), headers=text_headers, media_type="application/json")

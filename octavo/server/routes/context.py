"""What routes share: the handlers of bodies, and what they are given with one; the check of a request's fields."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar, get_type_hints

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams
from octavo.server.body_reader import Resident
from octavo.server.http.access_log import request_id_of
from octavo.server.http.bodies import accepted
from octavo.server.http.errors import model_not_found
from octavo.server.requests.fields import ApiRequest
from octavo.server.requests.parsing import parse
from octavo.server.served_model import ServedModel
from octavo.server.service import Service, TheService
from octavo.text.json_schema import unenforced

__all__ = ["Call", "Header", "TheModel", "check_fields", "json_answer", "post", "warn_of_structure"]

Header = tuple[bytes, bytes]
MAX_WARNED_FIELDS = 10
T = TypeVar("T", bound=ApiRequest)


def _ready_model(service: TheService) -> ServedModel:
    return service.ready_model()


TheModel = Annotated[ServedModel, Depends(_ready_model)]


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler knows beside the request's fields."""

    model: ServedModel
    service: Service
    request_id: str
    size: int
    """Bytes of the body."""


Handler = Callable[[T, Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Handle(Generic[T]):
    """A handler of bytes: `BodyReader` runs it on the event loop or in another process."""

    handler: Handler[T]
    kind: type[T]

    async def __call__(self, body: bytes, request_id: str, resident: Resident) -> Response:
        call = Call(resident["model"], resident["service"], request_id, len(body))
        try:
            return await self.handler(parse(self.kind, body), call)
        except RecursionError:
            raise InvalidRequestError("The body nests too deeply.") from None


def post(router: APIRouter, path: str) -> Callable[[Handler[T]], Handler[T]]:
    """Registers a handler of a body, whose first parameter's type says which fields that has.

    It may run in another process: it prepares a response, and leaves all else to that.
    """

    def register(handler: Handler[T]) -> Handler[T]:
        handle = _Handle(handler, get_type_hints(handler)["body"])

        async def endpoint(request: Request, service: TheService) -> Response:
            request_id, this = request_id_of(request.scope), accepted(request.scope)
            resident, bodies = this.model.resident(service), this.model.bodies
            with this.body() as body:
                if bodies is None:
                    return await handle(body, request_id, resident)
                return await bodies.respond(handle, body, request_id, resident)

        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{handle.kind.__name__}"}}}
        described = {"requestBody": {"content": content, "required": True}}
        router.post(path, name=handler.__name__, openapi_extra=described)(endpoint)
        return handler

    return register


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


def warn_of_structure(params: SamplingParams) -> list[Header]:
    """Headers that name what a schema demands and an answer may break."""
    schema = params.structured_outputs.json if params.structured_outputs is not None else None
    names = ", ".join(unenforced(schema if isinstance(schema, str) else None))
    return [(b"x-octavo-warning", f"not enforced in the answer: {names}".encode("ascii"))] if names else []


def json_answer(content: msgspec.Struct, headers: Sequence[Header] = ()) -> Response:
    text_headers = {name.decode(): value.decode() for name, value in headers}
    return Response(msgspec.json.encode(content), headers=text_headers, media_type="application/json")

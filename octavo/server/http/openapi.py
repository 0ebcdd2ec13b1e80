"""/openapi.json: FastAPI's description of requests, completed by what is answered. 422 is never sent, so not named.

A route that is new must have its answer here: a test compares the two.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo.server.http.errors import ErrorBody
from octavo.server.http.health import OPEN_PATHS, Health
from octavo.server.routes.chat import ChatCompletionRequest
from octavo.server.routes.completions import CompletionRequest
from octavo.server.routes.embeddings import EmbeddingList, EmbeddingRequest, PooledList, PoolingRequest
from octavo.server.routes.invocations import Invocation
from octavo.server.routes.models import ModelCard, ModelList
from octavo.server.routes.operations import Version
from octavo.server.routes.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from octavo.server.text_out.chat import ChatChunk, ChatCompletion
from octavo.server.text_out.completion import TextCompletion

__all__ = ["ANSWERS", "Answer", "install_openapi"]

REF = "#/components/schemas/{name}"
MODEL_REF = REF.format(name="{model}")
ERRORS = {
    400: "A field is wrong: `param` names it.",
    401: "No valid API key, where the server asks for one.",
    404: "No such model.",
    408: "The request took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    429: "Too many requests wait already; Retry-After says when to come back.",
    431: "The headers are too large.",
    500: "The server failed on this request.",
    503: "The server starts, drains, or has lost its engine; Retry-After says when to come back.",
    504: "The request took longer than the server's --request-timeout.",
}
GET_ERRORS = (401, 404, 408, 431, 500, 503)
BODY_ERRORS = tuple(ERRORS)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a 200 holds; None is plain text. `events` are what a streamed answer is made of, `body` what is sent.
    `is_binary`: it may also be bytes."""

    content: type[msgspec.Struct] | None
    events: type[msgspec.Struct] | None = None
    body: type[BaseModel] | None = None
    is_binary: bool = False
    others: tuple[type[msgspec.Struct], ...] = ()
    """What else it may hold in place of `content`."""


ANSWERS = {
    "/v1/chat/completions": Answer(ChatCompletion, ChatChunk, body=ChatCompletionRequest),
    "/v1/completions": Answer(TextCompletion, TextCompletion, body=CompletionRequest),
    "/v1/embeddings": Answer(EmbeddingList, body=EmbeddingRequest, is_binary=True),
    "/pooling": Answer(PooledList, body=PoolingRequest, is_binary=True),
    "/invocations": Answer(
        ChatCompletion, ChatChunk, Invocation, is_binary=True, others=(TextCompletion, EmbeddingList, PooledList)
    ),
    "/v1/models": Answer(ModelList),
    "/v1/models/{name}": Answer(ModelCard),
    "/tokenize": Answer(Tokenized, body=TokenizeRequest),
    "/detokenize": Answer(Detokenized, body=DetokenizeRequest),
    "/version": Answer(Version),
    "/health": Answer(Health),
    "/ping": Answer(Health),
    "/livez": Answer(Health),
    "/metrics": Answer(None),
}


def install_openapi(app: FastAPI) -> None:
    def describe() -> dict[str, Any]:
        app.openapi_schema = app.openapi_schema or _describe(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _describe(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    kinds = {kind for answer in ANSWERS.values() for kind in (answer.content, answer.events) if kind is not None}
    _, answers = msgspec.json.schema_components([*kinds, ErrorBody], ref_template=REF)
    schemas.update(answers)
    bodies = [answer.body for answer in ANSWERS.values() if answer.body is not None]
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=MODEL_REF)
    schemas.update(definitions["$defs"])
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation)
    return document


def _complete(path: str, operation: dict[str, Any]) -> None:
    answer = ANSWERS[path]
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if answer.content is not None:
        kinds = [_ref(kind) for kind in (answer.content, *answer.others)]
        content = {"application/json": {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}}
    if answer.events is not None:
        what = f"Server-sent events with `stream: true`: the data of each is a {answer.events.__name__}, or `[DONE]`."
        content["text/event-stream"] = {"schema": {"type": "string", "description": what}}
    if answer.is_binary:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in BODY_ERRORS if "requestBody" in operation else GET_ERRORS:
        # A probe says with its own content why it is not well.
        kind = answer.content if status == 503 and answer.content is Health else ErrorBody
        assert kind is not None
        responses[str(status)] = {
            "description": ERRORS[status],
            "content": {"application/json": {"schema": _ref(kind)}},
        }
    operation["responses"] = responses
    if path not in OPEN_PATHS:
        operation["security"] = [{}, {"key": []}]


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}

"""POST /v1/embeddings, and POST /pooling, which is the same in vLLM's shape."""

import asyncio
import base64
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Response
from starlette.types import Receive, Scope, Send

from octavo.api.embedding import Vector, check_dimensions, cut_off, pooling_of, vector_of
from octavo.api.generation import Generation
from octavo.errors import InvalidRequestError
from octavo.server.http.access_log import tell_usage
from octavo.server.requests.messages import ChatInput
from octavo.server.requests.numbers import Int, WireInt
from octavo.server.routes.context import Call, Header, check_fields, post
from octavo.server.routes.generation import abort_on_disconnect
from octavo.server.served_model import ServedModel
from octavo.server.service import Service
from octavo.server.text_out.vectors import VectorForm

__all__ = ["EmbeddingList", "EmbeddingRequest", "PooledList", "PoolingRequest", "router"]

router = APIRouter()
_encode = msgspec.json.Encoder().encode


class EmbeddingRequest(ChatInput):
    """Texts, or one chat."""

    input: str | list[str] | list[Int] | list[list[Int]] | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    """The last two give all vectors one after the other, "bytes" with their places in the header `metadata`."""
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "little", "big"] | None = None
    dimensions: WireInt | None = None
    use_activation: bool | None = None
    """Whether vectors are brought to length 1; None: as the model's are."""
    truncate_prompt_tokens: WireInt | None = None
    """Keep no more than this many tokens of each text, special ones included; -1: the model's limit."""
    truncation_side: Literal["left", "right"] | None = None
    """Which side is cut off; None is "right", which keeps each text's beginning."""
    priority: WireInt | None = None
    cache_salt: str | None = None

    def inputs(self, most: int) -> list[str | list[int]]:
        """One entry a text, of which there may be `most`, whichever of four forms the request has."""
        given = self.input
        if given is None:
            raise InvalidRequestError("input is required.", param="input")
        if isinstance(given, str):
            return [given]
        if not given:
            raise InvalidRequestError("The input is empty: it must hold at least one text.", param="input")
        if len(given) > most and not isinstance(given[0], int):
            raise InvalidRequestError(
                f"input must have at most {most} texts, got {len(given)}; --max-request-choices sets the limit.",
                param="input",
            )
        return [given] if isinstance(given[0], int) else list(given)


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "pooling"
    data: list[float] | str


class PooledList(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


class PoolingRequest(EmbeddingRequest):
    """vLLM's name for an embedding among other things."""

    task: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingJob:
    """A request that has passed every check."""

    prompts: list[list[int]]
    form: VectorForm
    encoding: Literal["float", "base64", "bytes", "bytes_only"]
    dimensions: int | None
    use_activation: bool | None
    priority: int
    cache_salt: str | None
    headers: list[tuple[bytes, bytes]]
    are_pooled: bool
    """Whether the answer is in the form of /pooling."""


@post(router, "/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, call: Call) -> Response:
    return await _embed(body, call, are_pooled=False)


@post(router, "/pooling")
async def pool(body: PoolingRequest, call: Call) -> Response:
    if body.task not in (None, "embed"):
        raise InvalidRequestError(f"Unsupported task: {body.task[:50]!r}. This model can embed.", param="task")
    return await _embed(body, call, are_pooled=True)


async def _embed(body: EmbeddingRequest, call: Call, are_pooled: bool) -> Response:
    model = call.model
    headers = check_fields(body, model)
    check_dimensions(body.dimensions, model.info)
    if body.cache_salt == "":
        raise InvalidRequestError("cache_salt must be a string that is not empty, or null.", param="cache_salt")
    prompts = await _prompts(body, call)
    model.limits.check_inputs(prompts)
    job = EmbeddingJob(
        prompts=prompts,
        form=VectorForm(body.embed_dtype or "float32", body.endianness or "little"),
        encoding=body.encoding_format or "float",
        dimensions=body.dimensions,
        use_activation=body.use_activation,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        headers=headers,
        are_pooled=are_pooled,
    )
    return EmbeddingResponse(model, job, call.service)


async def _prompts(body: EmbeddingRequest, call: Call) -> list[list[int]]:
    model = call.model
    most = cut_off(body.truncate_prompt_tokens, model.limits.max_model_len)
    if body.messages is None:
        inputs = body.inputs(model.limits.max_request_choices)
        adds_special = body.add_special_tokens is not False
        return await model.prompts.of_inputs(inputs, adds_special, most, keeps_end=body.truncation_side == "left")
    if body.input is not None:
        raise InvalidRequestError("Send either input or messages.", param="input")
    prompt = await model.prompts.of_messages(body, call.size)
    return [prompt[-most:] if most is not None and body.truncation_side == "left" else prompt[:most]]


class EmbeddingResponse(Response):
    """Errors are raised before the first byte, for the error handlers to answer. A client that goes away aborts."""

    def __init__(self, model: ServedModel, job: EmbeddingJob, service: Service) -> None:
        super().__init__()
        self._model = model
        self._job = job
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        generation = self._model.client.embed(job.prompts, job.priority, job.cache_salt)
        with generation:
            watcher = asyncio.create_task(abort_on_disconnect(receive, generation))
            try:
                vectors = await self._collect(generation)
            finally:
                watcher.cancel()
        num_tokens = sum(map(len, job.prompts))
        tell_usage(scope, num_tokens, 0)
        if len(vectors) < len(job.prompts):
            return  # the client is gone
        kind, body, headers = self._answer([vectors[index] for index in range(len(vectors))], num_tokens)
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", kind), length, *headers, *job.headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _collect(self, generation: Generation) -> dict[int, Vector]:
        """By the text's index."""
        pooling = pooling_of(self._model.info)
        vectors = {}
        async for deltas in generation:
            for delta in deltas:
                index = delta.request_id - generation.first_request_id
                vectors[index] = vector_of(delta, pooling, self._job.dimensions, self._job.use_activation)
        return vectors

    def _answer(self, vectors: list[Vector], num_tokens: int) -> tuple[bytes, bytes, list[Header]]:
        """The content's type, the content, and headers that describe it."""
        job = self._job
        head: dict[str, Any] = {
            "id": f"{'pool' if job.are_pooled else 'embd'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._model.name,
            "usage": EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        }
        if job.encoding in ("bytes", "bytes_only"):
            pieces = list(map(job.form.encode, vectors))
            items, start = [], 0
            for index, (vector, piece) in enumerate(zip(vectors, pieces, strict=True)):
                items.append(job.form.place(index, start, start + len(piece), len(vector)))
                start += len(piece)
            headers = [(b"metadata", _encode(head | {"data": items}))] if job.encoding == "bytes" else []
            return b"application/octet-stream", b"".join(pieces), headers
        shown: Iterable[list[float] | str] = (vector.tolist() for vector in vectors)
        if job.encoding == "base64":
            shown = (base64.b64encode(job.form.encode(vector)).decode() for vector in vectors)
        if job.are_pooled:
            pooled = [Pooled(index=index, data=data) for index, data in enumerate(shown)]
            return b"application/json", _encode(PooledList(**head, data=pooled)), []
        embeddings = [Embedding(index=index, embedding=embedding) for index, embedding in enumerate(shown)]
        return b"application/json", _encode(EmbeddingList(**head, data=embeddings)), []

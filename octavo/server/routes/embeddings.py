"""POST /v1/embeddings."""

import asyncio
import base64
import time
import uuid
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Response
from starlette.types import Receive, Scope, Send

from octavo.api.embedding import check_dimensions, cut_off, pooling_of, vector_of
from octavo.api.generation import Generation
from octavo.errors import InvalidRequestError
from octavo.server.http.access_log import tell_usage
from octavo.server.requests.fields import ApiRequest
from octavo.server.requests.numbers import Int, WireInt
from octavo.server.routes.context import Call, check_fields, post
from octavo.server.routes.generation import abort_on_disconnect
from octavo.server.served_model import ServedModel
from octavo.server.service import Service

__all__ = ["EmbeddingList", "EmbeddingRequest", "router"]

router = APIRouter()
_encode = msgspec.json.Encoder().encode


class EmbeddingRequest(ApiRequest):
    input: str | list[str] | list[Int] | list[list[Int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: WireInt | None = None
    truncate_prompt_tokens: WireInt | None = None
    """Keep no more than this many tokens from each text's beginning, special ones included; -1: the model's limit."""
    add_special_tokens: bool | None = None
    priority: WireInt | None = None
    cache_salt: str | None = None

    def inputs(self, most: int) -> list[str | list[int]]:
        """One entry a text, of which there may be `most`, whichever of four forms the request has."""
        given = self.input
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingJob:
    """A request that has passed every check."""

    prompts: list[list[int]]
    is_base64: bool
    dimensions: int | None
    priority: int
    cache_salt: str | None
    headers: list[tuple[bytes, bytes]]


@post(router, "/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, call: Call) -> Response:
    model = call.model
    headers = check_fields(body, model)
    check_dimensions(body.dimensions, model.info)
    most = cut_off(body.truncate_prompt_tokens, model.limits.max_model_len)
    inputs = body.inputs(model.limits.max_request_choices)
    prompts = await model.prompts.of_inputs(inputs, body.add_special_tokens is not False, most)
    model.limits.check_inputs(prompts)
    job = EmbeddingJob(
        prompts=prompts,
        is_base64=body.encoding_format == "base64",
        dimensions=body.dimensions,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        headers=headers,
    )
    return EmbeddingResponse(model, job, call.service)


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
        with self._service.answering(), generation:
            watcher = asyncio.create_task(abort_on_disconnect(receive, generation))
            try:
                vectors = await self._collect(generation)
            finally:
                watcher.cancel()
        num_tokens = sum(map(len, job.prompts))
        tell_usage(scope, num_tokens, 0)
        if len(vectors) == len(job.prompts):  # else the client is gone
            body = _encode(self._answer(vectors, num_tokens))
            length = (b"content-length", str(len(body)).encode())
            headers = [(b"content-type", b"application/json"), length, *job.headers]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _collect(self, generation: Generation) -> dict[int, npt.NDArray[np.float32]]:
        """By the text's index."""
        pooling = pooling_of(self._model.info)
        vectors = {}
        async for deltas in generation:
            for delta in deltas:
                index = delta.request_id - generation.first_request_id
                vectors[index] = vector_of(delta, pooling, self._job.dimensions)
        return vectors

    def _answer(self, vectors: dict[int, npt.NDArray[np.float32]], num_tokens: int) -> EmbeddingList:
        data = []
        for index in range(len(vectors)):
            vector = vectors[index].astype("<f4", copy=False)
            shown = base64.b64encode(vector.tobytes()).decode() if self._job.is_base64 else vector.tolist()
            data.append(Embedding(index=index, embedding=shown))
        return EmbeddingList(
            id=f"embd-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._model.name,
            data=data,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )

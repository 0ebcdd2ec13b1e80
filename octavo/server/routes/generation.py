"""GenerationResponse: a generation's deltas as server-sent events, or collected into one JSON answer.

A plain ASGI response: nothing between a delta and the socket but msgspec. A client that goes away ends its generation.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self, TypeVar

import msgspec
from fastapi import Response
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from octavo.api.choice import Choice, Piece, merge
from octavo.api.generation import Generation
from octavo.core.step import RequestDelta
from octavo.errors import InvalidRequestError, OctavoError
from octavo.sampling_params import SamplingParams
from octavo.server.http.access_log import tell_usage
from octavo.server.http.errors import ErrorBody, describe
from octavo.server.requests.sampling import SamplingRequest
from octavo.server.served_model import ServedModel
from octavo.server.service import Service
from octavo.server.text_out.shapes import ChunkUsage, Format, PromptTokensDetails, Usage
from octavo.text.detokenizer import TokenBytes

__all__ = ["GenerationJob", "GenerationResponse", "abort_on_disconnect"]

T = TypeVar("T")
MAX_WRITTEN = 200
"""Choices and tokens with log-probabilities that are written at once: a few milliseconds."""
logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
PING = b": waiting\n\n"
"""A comment, which readers of server-sent events skip."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A request that has passed every check."""

    prompts: list[list[int]]
    params: SamplingParams
    format: Format
    stream: bool
    includes_usage: bool
    has_continuous_usage: bool
    priority: int
    cache_salt: str | None
    headers: list[tuple[bytes, bytes]]
    tokens: TokenBytes
    """The tokenizer, as the text of the answers needs it."""
    structure_field: str | None
    """The field that asks for structured output."""

    @classmethod
    def of(
        cls,
        body: SamplingRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        answer: Format,
        tokens: TokenBytes,
        headers: list[tuple[bytes, bytes]],
    ) -> Self:
        options = body.stream_options
        return cls(
            prompts=prompts,
            params=params,
            format=answer,
            stream=bool(body.stream),
            includes_usage=options is not None and bool(options.include_usage),
            has_continuous_usage=options is not None
            and options.include_usage is not False
            and bool(options.continuous_usage_stats),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            headers=headers,
            tokens=tokens,
            structure_field=body.structure_field,
        )


class GenerationResponse(Response):
    """Errors before the first byte are raised, for the error handlers to answer; later ones become an event."""

    def __init__(self, model: ServedModel, service: Service, job: GenerationJob) -> None:
        super().__init__()
        self._service = service
        self._model = model
        self._job = job
        self._choices: list[Choice] = []
        self._is_open = False  # a stream, once its headers are sent
        self._num_sends = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        await self._model.check_structure(job.params, self._structure_field)
        self._choices = [Choice(job.tokens, job.params) for _ in range(len(job.prompts) * job.params.n)]
        generation = self._model.client.generate(job.prompts, job.params, job.priority, job.cache_salt)
        with generation:
            beside = [asyncio.create_task(abort_on_disconnect(receive, generation))]
            if job.stream and self._service.ping_s:
                beside.append(asyncio.create_task(self._ping(send, self._service.ping_s)))
            try:
                await (self._stream if job.stream else self._collect)(generation, send)
            finally:
                for task in beside:
                    task.cancel()
                usage = self._usage()
                tell_usage(scope, usage.prompt_tokens, usage.completion_tokens)

    async def _collect(self, generation: Generation, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        async for deltas in generation:
            for index, piece in self._pieces(generation, deltas):
                pieces[index].append(piece)
        if not self._is_finished:
            return  # the client is gone
        merged = [merge(parts) for parts in pieces]
        body = await _beside(lambda: _encode(self._job.format.whole(merged, self._usage())), merged)
        length = (b"content-length", str(len(body)).encode())
        await _start(send, [(b"content-type", b"application/json"), length, *self._job.headers])
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, generation: Generation, send: Send) -> None:
        is_first = True
        try:
            async for deltas in generation:
                # The usage of chunks that open the answer counts none of its tokens.
                opening = self._job.format.opening(self._chunk_usage()) if is_first else []
                is_first = False
                events = [*map(_event, opening), *await self._events(generation, deltas)]
                await self._open(send)
                if events:
                    await self._send_events(send, b"".join(events))
        except Exception as error:
            if not self._is_open:
                raise
            if not isinstance(error, OctavoError):
                logger.exception("A stream failed")
            _, body = describe(error)
            await send({"type": "http.response.body", "body": _event(ErrorBody(body)) + DONE})
            return
        if not self._is_finished:
            return  # the client is gone
        usage = _event(self._job.format.last(self._usage())) if self._job.includes_usage else b""
        await send({"type": "http.response.body", "body": usage + DONE})

    async def _open(self, send: Send) -> None:
        if not self._is_open:
            self._is_open = True
            await _start(send, [*EVENT_STREAM, *self._job.headers])

    async def _send_events(self, send: Send, events: bytes) -> None:
        self._num_sends += 1
        await send({"type": "http.response.body", "body": events, "more_body": True})

    async def _ping(self, send: Send, interval_s: float) -> None:
        """Show a client, and the proxies before it, that a stream lives which waits or reads a long prompt. Errors that
        come sooner have a status of their own."""
        while True:
            num_sends = self._num_sends
            await asyncio.sleep(interval_s)
            if self._num_sends == num_sends:
                await self._open(send)
                await self._send_events(send, PING)

    async def _events(self, generation: Generation, deltas: list[RequestDelta]) -> list[bytes]:
        """Those of each choice that has something to show."""
        news: dict[int, list[Piece]] = {}
        for index, piece in self._pieces(generation, deltas):
            news.setdefault(index, []).append(piece)
        merged = {index: merge(pieces) for index, pieces in news.items()}
        usage, chunks = self._chunk_usage(), self._job.format.chunks

        def write() -> list[bytes]:
            return [_event(chunk) for index, piece in merged.items() for chunk in chunks(index, piece, usage)]

        return await _beside(write, merged.values())

    def _pieces(self, generation: Generation, deltas: list[RequestDelta]) -> list[tuple[int, Piece]]:
        """The deltas as text, with the index of their choice. A stop string is reported to the engine."""
        pieces = []
        for delta in deltas:
            index = delta.request_id - generation.first_request_id
            choice = self._choices[index]
            if choice.is_finished:
                continue  # a stop string came before this delta
            try:
                pieces.append((index, choice.append(delta)))
            except InvalidRequestError as error:
                if error.param != "structured_outputs":
                    raise
                raise InvalidRequestError(error.message, self._structure_field, error.code) from None
            if choice.is_finished:
                generation.finish(delta.request_id, choice.num_tokens)
        return pieces

    @property
    def _structure_field(self) -> str:
        """A forced call asks for structured output, too."""
        return self._job.structure_field or "tools"

    @property
    def _is_finished(self) -> bool:
        return all(choice.is_finished for choice in self._choices)

    def _usage(self) -> Usage:
        """So far; a prompt counts once, however many choices it has."""
        num_prompt_tokens = sum(map(len, self._job.prompts))
        num_output_tokens = sum(choice.num_tokens for choice in self._choices)
        num_cached_tokens = sum(choice.num_cached_tokens for choice in self._choices[:: self._job.params.n])
        return Usage(
            num_prompt_tokens,
            num_output_tokens,
            num_prompt_tokens + num_output_tokens,
            PromptTokensDetails(num_cached_tokens),
        )

    def _chunk_usage(self) -> ChunkUsage:
        if self._job.has_continuous_usage:
            return self._usage()
        return None if self._job.includes_usage else UNSET


EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


LINE_SEPARATORS = [(c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029"]
"""Characters at which many clients cut a stream into lines, though server-sent events know only CR and LF."""


async def _beside(write: Callable[[], T], pieces: Collection[Piece]) -> T:
    """What `write` returns. It runs in a thread where thousands of log-probabilities or choices are to be written, so
    that other streams go on."""
    num_entries = sum(1 + len(piece.logprobs or ()) + len(piece.prompt_logprobs or ()) for piece in pieces)
    return write() if num_entries <= MAX_WRITTEN else await asyncio.to_thread(write)


async def _start(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


def _event(content: msgspec.Struct) -> bytes:
    data = _encode(content)
    if not data.isascii():
        for character, escape in LINE_SEPARATORS:
            data = data.replace(character, escape)
    return b"data: " + data + b"\n\n"


async def abort_on_disconnect(receive: Receive, generation: Generation) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.abort()

"""ChatFormat: the pieces of choices as chat completions."""

import time
from collections.abc import Sequence
from functools import cached_property

import msgspec
from msgspec import UNSET, UnsetType

from octavo.api.choice import Piece
from octavo.server.text_out.extras import Extras, ShownPrompt
from octavo.server.text_out.message import ChatMessage, Delta
from octavo.server.text_out.reading import MessageReader, Reading
from octavo.server.text_out.shapes import ChatLogprobs, ChunkUsage, PromptLogprob, Usage
from octavo.text.message_parts import Content

__all__ = ["ChatChoice", "ChatChunk", "ChatChunkChoice", "ChatCompletion", "ChatFormat"]


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class ChatFormat:
    def __init__(
        self,
        request_id: str,
        model: str,
        num_choices: int,
        prompt: ShownPrompt,
        extras: Extras,
        reading: Reading | None = None,
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._num_choices = num_choices
        self._reading = reading or Reading()
        self._prompt = prompt
        self._extras = extras

    @cached_property
    def _readers(self) -> list[MessageReader]:
        return [MessageReader(self._reading) for _ in range(self._num_choices)]

    def opening(self, usage: ChunkUsage) -> list[msgspec.Struct]:
        role = Delta(role="assistant", content=self._prompt.echo or "")
        first, *others = [self._chunk([ChatChunkChoice(index, role)], usage) for index in range(len(self._readers))]
        return [
            msgspec.structs.replace(first, prompt_token_ids=self._extras.chunk_ids(self._prompt.token_ids)),
            *others,
        ]

    def chunks(self, index: int, piece: Piece, usage: ChunkUsage) -> list[msgspec.Struct]:
        reader = self._readers[index]
        deltas = [reader.delta(part) for part in reader.parts(piece.text, piece.finish_reason is not None)]
        if not deltas and not self._extras.is_news(piece):
            return []
        *earlier, last = deltas or [Delta()]
        choices = [ChatChunkChoice(index, delta) for delta in earlier]
        choices.append(
            ChatChunkChoice(
                index,
                last,
                self._extras.chat_logprobs(piece),
                reader.finish_reason(piece.finish_reason),
                piece.stop_reason,
                self._extras.chunk_ids(piece.token_ids),
            )
        )
        return [self._chunk([choice], usage) for choice in choices]

    def last(self, usage: Usage) -> msgspec.Struct:
        return self._chunk([], usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        choices = [
            ChatChoice(
                index=index,
                message=reader.message([Content(self._prompt.echo or ""), *reader.parts(piece.text, is_last=True)]),
                logprobs=self._extras.chat_logprobs(piece),
                finish_reason=reader.finish_reason(piece.finish_reason),
                stop_reason=piece.stop_reason,
                token_ids=self._extras.ids(piece.token_ids),
            )
            for index, (reader, piece) in enumerate(zip(self._readers, pieces, strict=True))
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=self._extras.ids(self._prompt.token_ids),
            prompt_logprobs=self._extras.prompt_logprobs(self._prompt, pieces[0]),
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

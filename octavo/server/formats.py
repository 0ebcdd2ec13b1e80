"""ChatFormat and TextFormat: the pieces of choices, as the objects that the two APIs send."""

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UnsetType

from octavo.engine.choice import Piece
from octavo.server.logprobs import LogprobFormat
from octavo.server.reading import MessageReader, Reading
from octavo.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    TextChoice,
    TextCompletion,
    Usage,
)

__all__ = ["ChatFormat", "Format", "TextFormat"]

ChunkUsage = Usage | UnsetType | None


def _has_news(piece: Piece) -> bool:
    """Whether a piece without text is worth a chunk."""
    return bool(piece.logprobs) or piece.finish_reason is not None


class Format(Protocol):
    """One request's way to write its answer. `usage` of a chunk: UNSET leaves the field out."""

    def opening(self, usage: ChunkUsage) -> list[msgspec.Struct]:
        """Chunks that go before all pieces."""
        ...

    def chunks(self, index: int, piece: Piece, usage: ChunkUsage) -> list[msgspec.Struct]:
        """None for a piece in which there is nothing to show."""
        ...

    def last(self, usage: Usage) -> msgspec.Struct:
        """The chunk with the usage and no choice."""
        ...

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        """The answer in one, from one merged piece a choice."""
        ...


class ChatFormat:
    def __init__(
        self,
        request_id: str,
        model: str,
        num_choices: int,
        logprobs: LogprobFormat,
        reading: Reading | None = None,
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._readers = [MessageReader(reading or Reading()) for _ in range(num_choices)]
        self._logprobs = logprobs

    def opening(self, usage: ChunkUsage) -> list[msgspec.Struct]:
        role = Delta(role="assistant", content="")
        return [self._chunk([ChatChunkChoice(index, role)], usage) for index in range(len(self._readers))]

    def chunks(self, index: int, piece: Piece, usage: ChunkUsage) -> list[msgspec.Struct]:
        reader = self._readers[index]
        deltas = [reader.delta(part) for part in reader.parts(piece.text, piece.finish_reason is not None)]
        if not deltas and not _has_news(piece):
            return []
        *earlier, last = deltas or [Delta()]
        choices = [ChatChunkChoice(index, delta) for delta in earlier]
        choices.append(
            ChatChunkChoice(
                index,
                last,
                self._logprobs.chat(piece),
                reader.finish_reason(piece.finish_reason),
                piece.stop_reason,
            )
        )
        return [self._chunk([choice], usage) for choice in choices]

    def last(self, usage: Usage) -> msgspec.Struct:
        return self._chunk([], usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        choices = [
            ChatChoice(
                index=index,
                message=reader.message(reader.parts(piece.text, is_last=True)),
                logprobs=self._logprobs.chat(piece),
                finish_reason=reader.finish_reason(piece.finish_reason),
                stop_reason=piece.stop_reason,
            )
            for index, (reader, piece) in enumerate(zip(self._readers, pieces, strict=True))
        ]
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


class TextFormat:
    """`echoes`: for each choice the text that goes before what is generated; "" without echo."""

    def __init__(self, request_id: str, model: str, echoes: Sequence[str], logprobs: LogprobFormat) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]
        self._logprobs = logprobs

    def opening(self, usage: ChunkUsage) -> list[msgspec.Struct]:
        return [self._chunk([TextChoice(index, echo)], usage) for index, echo in enumerate(self._echoes) if echo]

    def chunks(self, index: int, piece: Piece, usage: ChunkUsage) -> list[msgspec.Struct]:
        if not piece.text and not _has_news(piece):
            return []
        return [self._chunk([self._choice(index, piece.text, piece)], usage)]

    def last(self, usage: Usage) -> msgspec.Struct:
        return self._chunk([], usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        return self._chunk(
            [self._choice(index, self._echoes[index] + piece.text, piece) for index, piece in enumerate(pieces)], usage
        )

    def _choice(self, index: int, text: str, piece: Piece) -> TextChoice:
        logprobs = self._logprobs.text(piece, self._offsets[index])
        if logprobs is not None:
            self._offsets[index] += sum(map(len, logprobs.tokens))
        return TextChoice(index, text, logprobs, piece.finish_reason, piece.stop_reason)

    def _chunk(self, choices: list[TextChoice], usage: ChunkUsage) -> TextCompletion:
        return TextCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

"""ChatFormat and TextFormat: the pieces of choices, as the objects that the two APIs send."""

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from octavo.api.choice import Piece
from octavo.core.step import TokenLogprobs
from octavo.server.reading import MessageReader, Reading
from octavo.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    Usage,
)
from octavo.server.wanted import ShownPrompt, Wanted
from octavo.text.message_parts import Content

__all__ = ["ChatFormat", "Format", "TextFormat"]

ChunkUsage = Usage | UnsetType | None


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
        prompt: ShownPrompt,
        wanted: Wanted,
        reading: Reading | None = None,
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._readers = [MessageReader(reading or Reading()) for _ in range(num_choices)]
        self._prompt = prompt
        self._wanted = wanted

    def opening(self, usage: ChunkUsage) -> list[msgspec.Struct]:
        role = Delta(role="assistant", content=self._prompt.echo or "")
        first, *others = [self._chunk([ChatChunkChoice(index, role)], usage) for index in range(len(self._readers))]
        return [msgspec.structs.replace(first, prompt_token_ids=self._wanted.ids(self._prompt.token_ids)), *others]

    def chunks(self, index: int, piece: Piece, usage: ChunkUsage) -> list[msgspec.Struct]:
        reader = self._readers[index]
        deltas = [reader.delta(part) for part in reader.parts(piece.text, piece.finish_reason is not None)]
        if not deltas and not self._wanted.is_news(piece):
            return []
        *earlier, last = deltas or [Delta()]
        choices = [ChatChunkChoice(index, delta) for delta in earlier]
        choices.append(
            ChatChunkChoice(
                index,
                last,
                self._wanted.chat_logprobs(piece),
                reader.finish_reason(piece.finish_reason),
                piece.stop_reason,
                self._wanted.ids(piece.token_ids),
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
                logprobs=self._wanted.chat_logprobs(piece),
                finish_reason=reader.finish_reason(piece.finish_reason),
                stop_reason=piece.stop_reason,
                token_ids=self._wanted.ids(piece.token_ids),
            )
            for index, (reader, piece) in enumerate(zip(self._readers, pieces, strict=True))
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=self._wanted.ids(self._prompt.token_ids),
            prompt_logprobs=self._wanted.prompt_logprobs(self._prompt, pieces[0]),
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


class TextFormat:
    """`prompts`: one for each choice."""

    def __init__(self, request_id: str, model: str, prompts: Sequence[ShownPrompt], wanted: Wanted) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._prompts = prompts
        self._wanted = wanted
        self._cursors = [wanted.format.cursor(len(prompt.echo or "")) for prompt in prompts]
        self._has_begun = [False for _ in prompts]

    def opening(self, usage: ChunkUsage) -> list[msgspec.Struct]:
        if self._wanted.num_logprobs is not None:
            return []  # the prompt's text comes together with its log-probabilities, which take a while
        prompts = enumerate(self._prompts)
        return [self._chunk([TextChoice(index, prompt.echo)], usage) for index, prompt in prompts if prompt.echo]

    def chunks(self, index: int, piece: Piece, usage: ChunkUsage) -> list[msgspec.Struct]:
        if not piece.text and not self._wanted.is_news(piece):
            return []
        return [self._chunk([self._choice(index, piece, has_opened=self._wanted.num_logprobs is None)], usage)]

    def last(self, usage: Usage) -> msgspec.Struct:
        return self._chunk([], usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        return self._chunk([self._choice(index, piece, False) for index, piece in enumerate(pieces)], usage)

    def _choice(self, index: int, piece: Piece, has_opened: bool) -> TextChoice:
        """`has_opened`: the prompt's text has been sent. A choice's first piece shows its prompt."""
        prompt, is_first = self._prompts[index], not self._has_begun[index]
        self._has_begun[index] = True
        return TextChoice(
            index,
            (prompt.echo or "") + piece.text if is_first and not has_opened else piece.text,
            self._logprobs(index, piece, is_first),
            piece.finish_reason,
            piece.stop_reason,
            self._wanted.ids(piece.token_ids),
            self._wanted.ids(prompt.token_ids) if is_first else UNSET,
            self._wanted.prompt_logprobs(prompt, piece),
        )

    def _logprobs(self, index: int, piece: Piece, is_first: bool) -> TextLogprobs | None:
        if self._wanted.num_logprobs is None:
            return None
        prompt, cursor = self._prompts[index], self._cursors[index]
        token_ids, offsets = piece.token_ids, cursor.offsets(piece.token_ids)
        logprobs: list[TokenLogprobs | None] = [*(piece.logprobs or ())]
        if prompt.echo is not None and is_first:
            token_ids = prompt.token_ids + token_ids
            offsets = cursor.prompt_offsets(prompt.token_ids, prompt.echo) + offsets
            logprobs = [None, *(piece.prompt_logprobs or ()), *logprobs]
        return self._wanted.format.text(token_ids, logprobs, offsets, self._wanted.num_logprobs)

    def _chunk(self, choices: list[TextChoice], usage: ChunkUsage) -> TextCompletion:
        return TextCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

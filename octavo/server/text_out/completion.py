"""TextFormat: the pieces of choices as plain completions."""

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from octavo.api.choice import Piece
from octavo.core.step import TokenLogprobs
from octavo.server.text_out.extras import Extras, ShownPrompt
from octavo.server.text_out.shapes import ChunkUsage, PromptLogprob, TextLogprobs, Usage

__all__ = ["TextChoice", "TextCompletion", "TextFormat"]


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType | None = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole completion, and each chunk of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class TextFormat:
    """`prompts`: one for each choice."""

    def __init__(self, request_id: str, model: str, prompts: Sequence[ShownPrompt], extras: Extras) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._prompts = prompts
        self._extras = extras
        self._cursors = [extras.format.cursor(len(prompt.echo or "")) for prompt in prompts]
        self._has_begun = [False for _ in prompts]

    def opening(self, usage: ChunkUsage) -> list[msgspec.Struct]:
        if self._extras.num_logprobs is not None:
            return []  # the prompt's text comes together with its log-probabilities, which take a while
        choices = [self._opened(index) for index, prompt in enumerate(self._prompts) if prompt.echo]
        return [self._chunk([choice], usage) for choice in choices]

    def _opened(self, index: int) -> TextChoice:
        prompt = self._prompts[index]
        self._begin(index)
        ids = self._extras.chunk_ids
        return TextChoice(index, prompt.echo or "", token_ids=ids([]), prompt_token_ids=ids(prompt.token_ids))

    def chunks(self, index: int, piece: Piece, usage: ChunkUsage) -> list[msgspec.Struct]:
        if not piece.text and not self._extras.is_news(piece):
            return []
        is_first = self._begin(index)
        prompt = self._prompts[index]
        echo = prompt.echo or "" if is_first else ""
        choice = TextChoice(
            index,
            echo + piece.text,
            self._logprobs(index, piece, is_first),
            piece.finish_reason,
            piece.stop_reason,
            self._extras.chunk_ids(piece.token_ids),
            self._extras.chunk_ids(prompt.token_ids) if is_first else UNSET,
        )
        return [self._chunk([choice], usage)]

    def last(self, usage: Usage) -> msgspec.Struct:
        return self._chunk([], usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        return self._chunk([self._whole_choice(index, piece) for index, piece in enumerate(pieces)], usage)

    def _whole_choice(self, index: int, piece: Piece) -> TextChoice:
        prompt = self._prompts[index]
        return TextChoice(
            index,
            (prompt.echo or "") + piece.text,
            self._logprobs(index, piece, is_first=True),
            piece.finish_reason,
            piece.stop_reason,
            self._extras.ids(piece.token_ids),
            self._extras.ids(prompt.token_ids),
            self._extras.prompt_logprobs(prompt, piece),
        )

    def _begin(self, index: int) -> bool:
        """Whether nothing of this choice has been sent yet: its first chunk shows its prompt."""
        is_first, self._has_begun[index] = not self._has_begun[index], True
        return is_first

    def _logprobs(self, index: int, piece: Piece, is_first: bool) -> TextLogprobs | None:
        if self._extras.num_logprobs is None:
            return None
        prompt, cursor = self._prompts[index], self._cursors[index]
        token_ids, offsets = piece.token_ids, cursor.offsets(piece.token_ids)
        logprobs: list[TokenLogprobs | None] = [*(piece.logprobs or ())]
        if prompt.echo is not None and is_first:
            token_ids = prompt.token_ids + token_ids
            offsets = cursor.prompt_offsets(prompt.token_ids, prompt.echo) + offsets
            logprobs = [None, *(piece.prompt_logprobs or ()), *logprobs]
        return self._extras.format.text(token_ids, logprobs, offsets, self._extras.num_logprobs)

    def _chunk(self, choices: list[TextChoice], usage: ChunkUsage) -> TextCompletion:
        return TextCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

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
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET


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
        prompts = enumerate(self._prompts)
        return [self._chunk([TextChoice(index, prompt.echo)], usage) for index, prompt in prompts if prompt.echo]

    def chunks(self, index: int, piece: Piece, usage: ChunkUsage) -> list[msgspec.Struct]:
        if not piece.text and not self._extras.is_news(piece):
            return []
        return [self._chunk([self._choice(index, piece, has_opened=self._extras.num_logprobs is None)], usage)]

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
            self._extras.ids(piece.token_ids),
            self._extras.ids(prompt.token_ids) if is_first else UNSET,
            self._extras.prompt_logprobs(prompt, piece),
        )

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

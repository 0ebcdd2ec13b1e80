"""Choice: one completion in the making. Token deltas in, text out; ends by a stop string or as the engine says.

Shared by the server and the offline `LLM`. Knows no HTTP and no engine: its reader reports a stop string to the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.step import RequestDelta, TokenLogprobs
from octavo.errors import InvalidRequestError, RequestFailedError
from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import Detokenizer, TokenBytes

__all__ = ["Choice", "Piece", "merge"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one delta adds to a choice."""

    text: str
    token_ids: list[int]
    """Tokens that count; of those that came after a stop string nothing is kept."""
    logprobs: list[TokenLogprobs] | None
    """One entry a token, where asked for."""
    finish_reason: str | None
    """"stop" or "length", in the last piece."""
    stop_reason: int | str | None
    """The stop token or stop string that ended the choice; None for the end-of-sequence token."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Where asked for, in the first piece that has a token or ends the choice: one entry for each token of the prompt
    but the first."""


class Choice:
    """The text of the pieces joined is the choice's text, however the tokens are split over deltas."""

    def __init__(self, tokenizer: TokenBytes, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, params.skip_special_tokens, params.stop, params.include_stop_str_in_output, params.min_tokens
        )
        self._prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self._shows_stop = params.include_stop_str_in_output
        self._constraint = params.constraint
        self.num_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens that came from the prefix cache."""
        self.is_finished = False

    def append(self, delta: RequestDelta) -> Piece:
        """Raises RequestFailedError when the engine gave the request up, InvalidRequestError when the request itself is
        to blame."""
        if delta.finish_reason in ("error", "abort"):
            self.is_finished = True
            if delta.fault is not None:
                raise InvalidRequestError(delta.error or "", delta.fault.param or self._constraint, delta.fault.code)
            raise RequestFailedError(delta.error or "The engine aborted the request.")
        self.num_cached_tokens = delta.num_cached_tokens
        text = self._text(delta)
        stopped_by = self._detokenizer.stopped_by
        token_ids, logprobs = delta.new_token_ids, delta.logprobs
        finish_reason: str | None = delta.finish_reason
        stop_reason: int | str | None = delta.stop_reason
        if stopped_by is not None:
            num_kept = self._detokenizer.num_tokens - self.num_tokens
            token_ids = token_ids[:num_kept]
            logprobs = None if logprobs is None else logprobs[:num_kept]
            finish_reason, stop_reason = "stop", stopped_by
        self.num_tokens += len(token_ids)
        self.is_finished = finish_reason is not None
        prompt_logprobs = self._prompt_part(delta)
        return Piece(text, token_ids, logprobs, finish_reason, stop_reason, prompt_logprobs)

    def _prompt_part(self, delta: RequestDelta) -> list[TokenLogprobs] | None:
        """The prompt's log-probabilities once all have come: with the first token, or the end."""
        if self._prompt_logprobs is None:
            return None
        self._prompt_logprobs += delta.prompt_logprobs or ()
        if not delta.new_token_ids and delta.finish_reason is None:
            return None
        whole, self._prompt_logprobs = self._prompt_logprobs, None
        return whole

    def _text(self, delta: RequestDelta) -> str:
        shown = delta.new_token_ids
        if delta.finish_reason == "stop" and not self._shows_stop:
            shown = shown[:-1]  # the end-of-sequence or stop token is no text
        text = self._detokenizer.append(shown)
        return text + self._detokenizer.finish() if delta.finish_reason is not None else text


def merge(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one choice as one."""
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    return Piece(
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        None if last.logprobs is None else [entry for piece in pieces for entry in piece.logprobs or ()],
        last.finish_reason,
        last.stop_reason,
        next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
    )

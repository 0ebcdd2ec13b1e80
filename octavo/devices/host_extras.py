"""Extra: what few requests ask for beyond a row of numbers, in numpy on the host: logits that are changed before a
token is drawn, and log-probabilities read after."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.core.step import NewRequest
from octavo.kernels.sampling import forbid
from octavo.sampling_params import SamplingParams

__all__ = ["Extra", "make_extra"]

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]


class Extra:
    """One request's extras.

    Invariant: `_output` and `_counts`, where they are kept, are of the accepted tokens alone, but for the time of one
    `process`, in which the drafts before the row count as output too.
    """

    def __init__(self, request: NewRequest, vocab_size: int) -> None:
        params = request.sampling_params
        self.num_logprobs = request.num_candidates or params.logprobs
        self._params = params
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._bias: tuple[Int64Array, Float32Array] | None = None  # token ids [B], values [B]
        self._banned: Int64Array | None = None  # [B]: not before min_tokens
        self._allowed: Int64Array | None = None  # [B]: no others
        self._output: list[int] | None = None  # for bad words
        self._in_prompt: npt.NDArray[np.bool_] | None = None  # [V], for the repetition penalty
        self._counts: npt.NDArray[np.int32] | None = None  # [V]: occurrences in the output
        if params.logit_bias:
            self._bias = (np.array(list(params.logit_bias)), np.array(list(params.logit_bias.values()), np.float32))
        if params.min_tokens and request.stop_token_ids:
            self._banned = np.array(sorted(request.stop_token_ids))
        if params.allowed_token_ids is not None:
            self._allowed = np.array(params.allowed_token_ids)
        if params.bad_words_token_ids:
            self._output = []
        if params.has_penalties:
            self._counts = np.zeros(vocab_size, np.int32)
            self._in_prompt = np.zeros(vocab_size, np.bool_)
            self._in_prompt[request.prompt_token_ids] = True

    @property
    def is_empty(self) -> bool:
        parts = (self.num_logprobs, self._bias, self._banned, self._allowed, self._output, self._counts)
        return all(part is None for part in parts)

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens are output from now on."""
        if self._counts is not None:
            for token_id in token_ids:
                self._counts[token_id] += 1
        if self._output is not None:
            self._output += token_ids

    def process(self, logits: Float32Array, position: int, drafts: Sequence[int], mask: UInt8Array | None) -> bool:
        """Apply bias, bans and penalties to one row [V] in place; returns whether there were any. The mask is applied
        later, since nothing here revives a token that it forbids; but bans must know what it leaves."""
        self.accept(drafts)
        try:
            return self._process(logits, position, mask)
        finally:
            self._take_back(drafts)

    def _take_back(self, token_ids: Sequence[int]) -> None:
        """The last of the output."""
        if self._counts is not None:
            for token_id in token_ids:
                self._counts[token_id] -= 1
        if self._output is not None:
            del self._output[len(self._output) - len(token_ids) :]

    def _process(self, logits: Float32Array, position: int, mask: UInt8Array | None) -> bool:
        changed = False
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill(-np.inf)
            logits[self._allowed] = kept
            changed = True
        if self._output is not None:
            for *before, last in self._params.bad_words_token_ids:
                if not before or self._output[-len(before) :] == before:
                    logits[last] = -np.inf
                    changed = True
        if self._bias is not None:
            ids, values = self._bias
            logits[ids] += values
            changed = True
        if self._banned is not None and position - self._num_prompt_tokens < self._params.min_tokens:
            _ban(logits, self._banned, mask)
            changed = True
        if self._counts is not None and self._in_prompt is not None:
            _penalise(logits, self._params, self._counts, self._in_prompt)
            changed = True
        return changed


def make_extra(request: NewRequest, vocab_size: int) -> Extra | None:
    """None for a request that asks for nothing of the kind."""
    extra = Extra(request, vocab_size)
    return None if extra.is_empty else extra


def _ban(logits: Float32Array, banned: Int64Array, mask: UInt8Array | None) -> None:
    """Rule out tokens; but where a grammar leaves no others, the output is complete, however short."""
    if mask is not None:
        forbid(logits, mask)
    kept = logits[banned]
    logits[banned] = -np.inf
    if mask is not None and logits.max() == -np.inf:
        logits[banned] = kept


def _penalise(
    logits: Float32Array, params: SamplingParams, counts: npt.NDArray[np.int32], in_prompt: npt.NDArray[np.bool_]
) -> None:
    if params.repetition_penalty != 1.0:
        seen = np.flatnonzero(in_prompt | (counts > 0))
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if params.frequency_penalty or params.presence_penalty:
        seen = np.flatnonzero(counts)
        logits[seen] -= np.float32(params.frequency_penalty) * counts[seen] + np.float32(params.presence_penalty)

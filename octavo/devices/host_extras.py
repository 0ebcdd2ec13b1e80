"""Extra: what few requests ask for beyond a row of numbers, in numpy on the host: logits that are changed before a
token is drawn, and log-probabilities read after."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.core.step import NewRequest
from octavo.kernels.sampling import forbid
from octavo.sampling_params import SamplingParams

__all__ = ["Constraints", "Extra", "make_extra"]

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]


class Constraints:
    """What parameters say of the tokens alone, as arrays: one object for all requests that were sent together, since
    there may be thousands of them and each may name every token of the vocabulary."""

    def __init__(self, request: NewRequest) -> None:
        params = request.sampling_params
        self._named = _named(request)
        self.bias: tuple[Int64Array, Float32Array] | None = None  # token ids [B], values [B]
        self.banned: Int64Array | None = None  # [B]: not before min_tokens
        self.allowed: Int64Array | None = None  # [B]: no others
        self.has_bad_words = bool(params.bad_words_token_ids)
        self.bad_tokens: list[int] = []
        """Bad words of one token."""
        self.bad_ends: dict[int, list[tuple[list[int], int]]] = {}
        """By the last but one token of a bad word: what goes before its last, and that."""
        if params.logit_bias:
            self.bias = (np.array(list(params.logit_bias)), np.array(list(params.logit_bias.values()), np.float32))
        if params.min_tokens and request.stop_token_ids:
            self.banned = np.array(sorted(request.stop_token_ids))
        if params.allowed_token_ids is not None:
            self.allowed = np.array(params.allowed_token_ids)
        for *before, last in params.bad_words_token_ids:
            if before:
                self.bad_ends.setdefault(before[-1], []).append((before, last))
            else:
                self.bad_tokens.append(last)

    def are_of(self, request: NewRequest) -> bool:
        """Whether the request names the same tokens: in the very same objects, which is quickly seen."""
        return all(one is other for one, other in zip(self._named, _named(request), strict=True))

    def forbidden(self, output: list[int]) -> list[int]:
        """Tokens that would complete a bad word."""
        ends = self.bad_ends.get(output[-1], ()) if output else ()
        return self.bad_tokens + [last for before, last in ends if output[-len(before) :] == before]


def _named(request: NewRequest) -> tuple[object, ...]:
    params = request.sampling_params
    return (
        params.logit_bias,
        params.allowed_token_ids,
        params.bad_words_token_ids,
        params.min_tokens,
        request.stop_token_ids,
    )


class Extra:
    """One request's extras.

    Invariant: `_output` and `_counts`, where they are kept, are of the accepted tokens alone, but for the time of one
    `process`, in which the drafts before the row count as output too.
    """

    def __init__(self, request: NewRequest, vocab_size: int, constraints: Constraints) -> None:
        params = request.sampling_params
        self.num_logprobs = request.num_candidates or params.logprobs
        self.logprob_token_ids = params.logprob_token_ids
        self._params = params
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._constraints = constraints
        self._output: list[int] | None = [] if constraints.has_bad_words else None
        self._in_prompt: npt.NDArray[np.bool_] | None = None  # [V], for the repetition penalty
        self._counts: npt.NDArray[np.int32] | None = None  # [V]: occurrences in the output
        if params.has_penalties:
            self._counts = np.zeros(vocab_size, np.int32)
            self._in_prompt = np.zeros(vocab_size, np.bool_)
            self._in_prompt[request.prompt_token_ids] = True

    @property
    def is_empty(self) -> bool:
        named = self._constraints
        parts = (self.num_logprobs, named.bias, named.banned, named.allowed, self._output, self._counts)
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
        named, changed = self._constraints, False
        if named.allowed is not None:
            kept = logits[named.allowed]
            logits.fill(-np.inf)
            logits[named.allowed] = kept
            changed = True
        if self._output is not None and (forbidden := named.forbidden(self._output)):
            logits[forbidden] = -np.inf
            changed = True
        if named.bias is not None:
            ids, values = named.bias
            logits[ids] += values
            changed = True
        if named.banned is not None and position - self._num_prompt_tokens < self._params.min_tokens:
            _ban(logits, named.banned, mask)
            changed = True
        if self._counts is not None and self._in_prompt is not None:
            _penalise(logits, self._params, self._counts, self._in_prompt)
            changed = True
        return changed


def make_extra(request: NewRequest, vocab_size: int, constraints: Constraints) -> Extra | None:
    """None for a request that asks for nothing of the kind."""
    extra = Extra(request, vocab_size, constraints)
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

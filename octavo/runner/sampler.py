"""Sampler: logits to tokens, for a batch of requests with different parameters.

Every row is computed from that row alone, by operations whose order does not depend on the batch, with noise that is a
function of (seed, choice, position). Order of the steps is vLLM's: grammar, bias and bans, penalties, temperature,
min_p, top_k, top_p. Knows rows and positions, not requests. numpy, on the host: its sums over a row have one order,
and are fast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.core.step import NewRequest, TokenLogprobs, TokenMask
from octavo.runner.logprobs import token_logprobs
from octavo.runner.philox import uniform
from octavo.sampling_params import SamplingParams

__all__ = ["SampledTokens", "Sampler"]

SUM_BLOCK = 256
"""Weights that are added up together when a row is searched for the drawn token."""
THRESHOLDS = (1e-3, 1e-6, -1.0)
"""Weights, the largest being 1, above which filters look for their tokens; the last takes all."""

NOT_FINITE = "The model's logits are not finite: the computation overflowed or the weights are damaged."
NOTHING_LEFT = (
    "No token is left to sample: structured output, allowed_token_ids, bad_words, logit_bias and min_tokens rule out "
    "all of them."
)

NO_MASKS: Mapping[int, TokenMask] = {}

BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BIAS_OF_BYTE = np.where(BITS_OF_BYTE, np.float32(0), np.float32(-np.inf))  # [256, 8], float32
"""What eight bits of a mask add to their tokens' logits: a table is several times as fast as a selection."""

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    token_ids: npt.NDArray[np.int64]  # [S]
    logprobs: list[TokenLogprobs | None]
    failed: dict[int, str]
    """Rows that have no token, and why."""


@dataclass(slots=True)
class _Row:
    """Sampling state of one request."""

    params: SamplingParams
    seed: int
    choice: int
    num_prompt_tokens: int
    bias: tuple[npt.NDArray[np.int64], Float32Array] | None  # token ids [B], values [B]
    banned: npt.NDArray[np.int64] | None  # [B]: not before min_tokens
    allowed: npt.NDArray[np.int64] | None  # [B]: no others
    output: list[int] | None  # sampled so far, for bad_words
    in_prompt: npt.NDArray[np.bool_] | None  # [V], for the repetition penalty
    counts: npt.NDArray[np.int32] | None  # [V]: occurrences in the output, for the penalties


class Sampler:
    """Holds the sampling state of every request the runner knows, under the InputBatch's row numbers."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}

    def add(self, row: int, request: NewRequest) -> None:
        params = request.sampling_params
        bias, banned, allowed, in_prompt, counts = None, None, None, None, None
        if params.logit_bias:
            bias = (np.array(list(params.logit_bias)), np.array(list(params.logit_bias.values()), np.float32))
        if params.min_tokens and request.stop_token_ids:
            banned = np.array(request.stop_token_ids)
        if params.allowed_token_ids is not None:
            allowed = np.array(params.allowed_token_ids)
        output: list[int] | None = [] if params.bad_words_token_ids else None
        if params.has_penalties:
            counts = np.zeros(self.vocab_size, np.int32)
            in_prompt = np.zeros(self.vocab_size, np.bool_)
            in_prompt[request.prompt_token_ids] = True
        num_prompt_tokens = len(request.prompt_token_ids)
        self._rows[row] = _Row(
            params, request.seed, request.choice, num_prompt_tokens, bias, banned, allowed, output, in_prompt, counts
        )

    def remove(self, row: int) -> None:
        del self._rows[row]

    def sample(
        self,
        logits: Float32Array,
        rows: Sequence[int],
        positions: npt.NDArray[np.int32],
        masks: Mapping[int, TokenMask] = NO_MASKS,
    ) -> SampledTokens:
        """logits [S, V], overwritten; rows [S]; positions [S]: of the tokens being sampled; masks of the constrained
        ones, by their place among the S."""
        states = [self._rows[row] for row in rows]
        token_ids = logits.argmax(axis=-1)  # the first of equals; a NaN wins and is seen
        finite = np.isfinite(logits[np.arange(len(states)), token_ids])
        failed = dict.fromkeys(np.flatnonzero(~finite).tolist(), NOT_FINITE)
        raw = {i: logits[i].copy() for i, state in enumerate(states) if state.params.logprobs is not None}
        for i, state in enumerate(states):
            if i not in failed and _process(logits[i], state, int(positions[i]), masks.get(i)):
                token_ids[i] = logits[i].argmax()
                if logits[i, token_ids[i]] == -np.inf:
                    failed[i] = NOTHING_LEFT
        random = [i for i, state in enumerate(states) if not state.params.is_greedy and i not in failed]
        if random:
            self._draw(logits, [states[i] for i in random], random, positions, token_ids)
        for i, state in enumerate(states):
            if state.counts is not None:
                state.counts[token_ids[i]] += 1
            if state.output is not None:
                state.output.append(int(token_ids[i]))
        logprobs = [
            token_logprobs(raw[i], int(token_ids[i]), state.params.logprobs or 0) if i in raw else None
            for i, state in enumerate(states)
        ]
        return SampledTokens(token_ids, logprobs, failed)

    @staticmethod
    def _draw(
        logits: Float32Array,
        states: Sequence[_Row],
        rows: Sequence[int],
        positions: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int64],
    ) -> None:
        """Replace the most likely token of these rows by one drawn at the row's own noise."""
        noise = uniform(
            np.array([state.seed for state in states], dtype=np.int64).astype(np.uint64),
            np.array([state.choice for state in states], dtype=np.uint32),
            positions[rows].astype(np.uint32),
        )
        for row, state, number in zip(rows, states, noise.tolist(), strict=True):
            weights = logits[row]
            weights -= weights[token_ids[row]]
            weights /= np.float32(state.params.temperature)
            np.exp(weights, out=weights)
            token_ids[row] = _draw_filtered(weights, state.params, number)


def _process(logits: Float32Array, state: _Row, position: int, mask: TokenMask | None) -> bool:
    """Apply mask, bias, bans and penalties to one row [V] in place; returns whether there were any."""
    changed = False
    if mask is not None:
        _forbid(logits, mask)
        changed = True
    if state.allowed is not None:
        kept = logits[state.allowed]
        logits.fill(-np.inf)
        logits[state.allowed] = kept
        changed = True
    if state.output is not None:
        for *before, last in state.params.bad_words_token_ids:
            if not before or state.output[-len(before) :] == before:
                logits[last] = -np.inf
                changed = True
    if state.bias is not None:
        ids, values = state.bias
        logits[ids] += values
        changed = True
    if state.banned is not None and position - state.num_prompt_tokens < state.params.min_tokens:
        kept = logits[state.banned]
        logits[state.banned] = -np.inf
        if mask is not None and logits.max() == -np.inf:
            logits[state.banned] = kept  # the output is complete, however short
        changed = True
    if state.counts is not None and state.in_prompt is not None:
        _penalise(logits, state.params, state.counts, state.in_prompt)
        changed = True
    return changed


def _forbid(logits: Float32Array, mask: TokenMask) -> None:
    """Rule out what the mask does not allow, in one row [V]."""
    logits += BIAS_OF_BYTE.take(np.frombuffer(mask, np.uint8), axis=0).reshape(-1)[: len(logits)]


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


def _draw_filtered(weights: Float32Array, params: SamplingParams, noise: float) -> int:
    """A token of one row of weights [V], the largest being 1, among those that min_p, top_k and top_p leave."""
    if params.top_k <= 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return _draw_any(weights, noise)
    for threshold in THRESHOLDS:
        ids = np.flatnonzero(weights > threshold)
        order = np.argsort(-weights[ids], kind="stable")  # the lower id first among equals
        sorted_weights = weights[ids[order]].astype(np.float64)
        num_kept = int(np.count_nonzero(sorted_weights >= params.min_p))
        if params.top_k > 0:
            num_kept = min(num_kept, params.top_k)
        cumulative = sorted_weights[:num_kept].cumsum()
        total = cumulative[-1]
        # Whether every token that min_p and top_k leave is at hand, so that `total` is theirs.
        is_whole = threshold < 0 or params.min_p > threshold or 0 < params.top_k <= len(ids)
        if not is_whole:
            if params.top_k > 0 or params.min_p > 0:
                continue
            total = float(_block_sums(weights).sum())
            if cumulative[-1] < params.top_p * total:
                continue
        nucleus = min(int(np.searchsorted(cumulative, params.top_p * total)) + 1, num_kept)
        return int(ids[order[_invert(cumulative[:nucleus], noise)]])
    raise AssertionError("the last threshold takes every token")


def _draw_any(weights: Float32Array, noise: float) -> int:
    """A token of the whole row: first the block it lies in, then its place there."""
    sums = _block_sums(weights).cumsum()
    target = noise * sums[-1]
    block = _invert(sums, noise)
    inside = weights[block * SUM_BLOCK : (block + 1) * SUM_BLOCK].astype(np.float64).cumsum()
    target -= sums[block - 1] if block else 0.0
    return block * SUM_BLOCK + _invert(inside, min(max(target / inside[-1], 0.0), 1.0))


def _block_sums(weights: Float32Array) -> Float64Array:
    """Sums of SUM_BLOCK weights each, the last one shorter."""
    num_whole = len(weights) // SUM_BLOCK * SUM_BLOCK
    sums = weights[:num_whole].reshape(-1, SUM_BLOCK).sum(axis=1).astype(np.float64)
    return sums if num_whole == len(weights) else np.append(sums, weights[num_whole:].sum(dtype=np.float64))


def _invert(cumulative: Float64Array, noise: float) -> int:
    """The first index whose cumulative sum exceeds `noise` times the total; never one of weight 0."""
    total = cumulative[-1]
    index = int(np.searchsorted(cumulative, noise * total, side="right"))
    return min(index, int(np.searchsorted(cumulative, total)))  # rounding must not lead beyond the last with a weight

"""Sampler: logits to tokens, for a batch of requests with different parameters.

Every row is computed from that row alone, by operations whose order does not depend on the batch, with noise that is a
function of (seed, choice, position). Order of the steps is vLLM's: grammar, bias and bans, penalties, temperature,
min_p, top_k, top_p. Knows rows and positions, not requests. What every row needs is one op, `Ops.sample_rows`; what
few rows ask for beside it is numpy, on the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from octavo.core.step import NewRequest, TokenLogprobs, TokenMask
from octavo.kernels.ops import Ops
from octavo.kernels.sampling import NOT_FINITE, NOTHING_LEFT, SAMPLE_ROW, SampleRows, forbid
from octavo.runner.logprobs import token_logprobs
from octavo.sampling_params import SamplingParams

__all__ = ["FAILURES", "Draw", "SampledTokens", "Sampler"]

Draw = Literal["no", "any", "most_likely"]
"""Whether a step draws its tokens itself, and how."""

FAILURES = {
    NOT_FINITE: "The model's logits are not finite: the computation overflowed or the weights are damaged.",
    NOTHING_LEFT: (
        "No token is left to sample: structured output, allowed_token_ids, bad_words, logit_bias and min_tokens rule "
        "out all of them."
    ),
}

NO_MASKS: Mapping[int, TokenMask] = {}

Float32Array = npt.NDArray[np.float32]


class SampledTokens(Struct, frozen=True, gc=False):
    token_ids: list[int]  # [S]
    logprobs: list[TokenLogprobs | None]
    failed: dict[int, str]
    """Rows that have no token, and why."""


@dataclass(slots=True)
class _Extra:
    """What a request asks for beyond its row of numbers: logits changed before, or read after, a token is drawn."""

    params: SamplingParams
    num_logprobs: int | None
    num_prompt_tokens: int
    bias: tuple[npt.NDArray[np.int64], Float32Array] | None  # token ids [B], values [B]
    banned: npt.NDArray[np.int64] | None  # [B]: not before min_tokens
    allowed: npt.NDArray[np.int64] | None  # [B]: no others
    output: list[int] | None  # sampled so far, for bad_words
    in_prompt: npt.NDArray[np.bool_] | None  # [V], for the repetition penalty
    counts: npt.NDArray[np.int32] | None  # [V]: occurrences in the output, for the penalties


class _Drawn:
    """The numbers of one batch's rows, and views of what varies from step to step."""

    def __init__(self, rows: list[int], numbers: SampleRows, filled: SampleRows) -> None:
        """`filled` has what goes into `numbers`, but for the positions."""
        self.rows = rows
        self.numbers = numbers
        self.positions = self.numbers["position"]
        filled["position"] = self.positions
        numbers[:] = filled
        self.masks = self.numbers["mask"]
        self.token_ids = self.numbers["token_id"]
        self.statuses = self.numbers["status"]
        self.are_greedy = not self.numbers["temperature"].any()


class Sampler:
    """Holds the sampling state of every request the runner knows, under the InputBatch's row numbers."""

    def __init__(self, vocab_size: int, ops: Ops, draws: SampleRows) -> None:
        """draws [R]: where the numbers of the rows that sample in a step go."""
        self.vocab_size = vocab_size
        self._ops = ops
        self._draws = draws
        self._rows: SampleRows = np.zeros(64, SAMPLE_ROW)
        self._extras: dict[int, _Extra] = {}
        self._drawn: _Drawn | None = None  # of the last step; the next one's is mostly the same

    def add(self, row: int, request: NewRequest) -> None:
        params = request.sampling_params
        if row >= len(self._rows):
            self._rows = np.concatenate((self._rows, np.zeros(row, SAMPLE_ROW)))
        self._drawn = None
        one = self._rows[row]
        one["seed"], one["choice"] = request.seed % 2**64, request.choice
        one["temperature"] = 0.0 if params.is_greedy else params.temperature
        one["top_k"], one["top_p"], one["min_p"] = params.top_k, params.top_p, params.min_p
        extra = _extra(params, request, self.vocab_size)
        if extra is not None:
            self._extras[row] = extra

    def remove(self, row: int) -> None:
        self._extras.pop(row, None)

    def prepare(self, rows: list[int]) -> Draw:
        """Before the logits are there: fill in the numbers of these rows [S], all but the positions. Returns which op
        is all that is left to do, if their logits need nothing else."""
        if self._drawn is None or self._drawn.rows != rows:
            self._drawn = _Drawn(rows, self._draws[: len(rows)], self._rows[rows])
        if self._extras and not self._extras.keys().isdisjoint(rows):
            return "no"
        return "most_likely" if self._drawn.are_greedy else "any"

    def drawn(self, token_ids: list[int], are_good: bool) -> SampledTokens:
        """What the op has drawn for the rows that were prepared, read already."""
        assert self._drawn is not None
        failed = {} if are_good else _failures(self._drawn)
        return SampledTokens(token_ids, [None] * len(token_ids), failed)

    def sample(self, logits: Float32Array, masks: Mapping[int, TokenMask] = NO_MASKS) -> SampledTokens:
        """Draw for the rows that were prepared. logits [S, V], overwritten; masks of the constrained ones, by their
        place among the S."""
        assert self._drawn is not None
        drawn = self._drawn
        failed: dict[int, str] = {}
        extras = self._extras_of(drawn.rows) if self._extras else {}
        raw = {i: logits[i].copy() for i, extra in extras.items() if extra.num_logprobs is not None}
        for i, extra in extras.items():
            if not np.isfinite(logits[i].max()):  # a NaN wins
                failed[i] = FAILURES[NOT_FINITE]
            elif _process(logits[i], extra, int(drawn.positions[i]), masks.get(i)) and logits[i].max() == -np.inf:
                failed[i] = FAILURES[NOTHING_LEFT]
        if masks:
            drawn.masks[list(masks)] = [_address(mask, self.vocab_size) for mask in masks.values()]
        try:
            self._ops.sample_rows(logits, drawn.numbers)
        finally:
            if masks:
                drawn.masks[:] = 0
        token_ids: list[int] = drawn.token_ids.tolist()
        sampled = SampledTokens(token_ids, [None] * len(token_ids), _failures(drawn) | failed)
        for i, extra in extras.items():
            token_id = sampled.token_ids[i]
            if extra.counts is not None:
                extra.counts[token_id] += 1
            if extra.output is not None:
                extra.output.append(token_id)
            if i in raw:
                sampled.logprobs[i] = token_logprobs(raw[i], token_id, extra.num_logprobs or 0)
        return sampled

    def _extras_of(self, rows: list[int]) -> dict[int, _Extra]:
        return {i: self._extras[row] for i, row in enumerate(rows) if row in self._extras}


def _failures(drawn: _Drawn) -> dict[int, str]:
    return {i: FAILURES[status] for i, status in enumerate(drawn.statuses.tolist()) if status}


def _extra(params: SamplingParams, request: NewRequest, vocab_size: int) -> _Extra | None:
    bias, banned, allowed, in_prompt, counts = None, None, None, None, None
    if params.logit_bias:
        bias = (np.array(list(params.logit_bias)), np.array(list(params.logit_bias.values()), np.float32))
    if params.min_tokens and request.stop_token_ids:
        banned = np.array(request.stop_token_ids)
    if params.allowed_token_ids is not None:
        allowed = np.array(params.allowed_token_ids)
    output: list[int] | None = [] if params.bad_words_token_ids else None
    if params.has_penalties:
        counts = np.zeros(vocab_size, np.int32)
        in_prompt = np.zeros(vocab_size, np.bool_)
        in_prompt[request.prompt_token_ids] = True
    parts = (bias, banned, allowed, output, in_prompt, counts)
    num_logprobs = request.num_candidates or params.logprobs
    if num_logprobs is None and all(part is None for part in parts):
        return None
    return _Extra(params, num_logprobs, len(request.prompt_token_ids), *parts)


def _address(mask: TokenMask, vocab_size: int) -> int:
    """Of the mask's first byte; its owner keeps it until the token is accepted."""
    if 8 * len(mask) < vocab_size:
        raise IndexError(f"a mask of {8 * len(mask)} bits for a vocabulary of {vocab_size}")
    return np.frombuffer(mask, np.uint8).ctypes.data


def _process(logits: Float32Array, state: _Extra, position: int, mask: TokenMask | None) -> bool:
    """Apply bias, bans and penalties to one row [V] in place; returns whether there were any. The mask is applied
    later, since nothing here revives a token that it forbids; but bans must know what it leaves."""
    changed = False
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
        if mask is not None:
            forbid(logits, np.frombuffer(mask, np.uint8))
        kept = logits[state.banned]
        logits[state.banned] = -np.inf
        if mask is not None and logits.max() == -np.inf:
            logits[state.banned] = kept  # the output is complete, however short
        changed = True
    if state.counts is not None and state.in_prompt is not None:
        _penalise(logits, state.params, state.counts, state.in_prompt)
        changed = True
    return changed


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

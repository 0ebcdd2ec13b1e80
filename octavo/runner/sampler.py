"""Sampler: logits to tokens, for a batch of requests with different parameters.

Every row is computed from that row alone, by operations whose order does not depend on the batch, with noise that is a
function of (seed, choice, position). Order of the steps is vLLM's: bias and bans, penalties, temperature, min_p, top_k,
top_p. Knows rows and positions, not requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.step import NewRequest, TokenLogprobs
from octavo.runner.philox import uniform
from octavo.sampling_params import SamplingParams

__all__ = ["SampledTokens", "Sampler"]

NUM_CANDIDATES = 1024
"""Most likely tokens that filters look at first; a row that needs more sorts its whole vocabulary."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    token_ids: npt.NDArray[np.int64]  # [S]
    logprobs: list[TokenLogprobs | None]
    failed: npt.NDArray[np.bool_]  # [S]: the row's logits held a NaN or an infinity


@dataclass(slots=True)
class _Row:
    """Sampling state of one request."""

    params: SamplingParams
    seed: int
    choice: int
    num_prompt_tokens: int
    bias: tuple[torch.Tensor, torch.Tensor] | None  # token ids [B] int64, values [B] float32
    banned: torch.Tensor | None  # [B] int64: not before min_tokens
    in_prompt: torch.Tensor | None  # [V] bool, for the repetition penalty
    counts: torch.Tensor | None  # [V] int32: occurrences in the output, for the penalties


class Sampler:
    """Holds the sampling state of every request the runner knows, under the InputBatch's row numbers."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}

    def add(self, row: int, request: NewRequest) -> None:
        params = request.sampling_params
        bias, banned, in_prompt, counts = None, None, None, None
        if params.logit_bias:
            bias = (torch.tensor(list(params.logit_bias)), torch.tensor(list(params.logit_bias.values())))
        if params.min_tokens and request.stop_token_ids:
            banned = torch.tensor(sorted(request.stop_token_ids))
        if params.has_penalties:
            counts = torch.zeros(self.vocab_size, dtype=torch.int32)
            in_prompt = torch.zeros(self.vocab_size, dtype=torch.bool)
            in_prompt[torch.tensor(request.prompt_token_ids)] = True
        num_prompt_tokens = len(request.prompt_token_ids)
        self._rows[row] = _Row(params, request.seed, request.choice, num_prompt_tokens, bias, banned, in_prompt, counts)

    def remove(self, row: int) -> None:
        del self._rows[row]

    def sample(self, logits: torch.Tensor, rows: Sequence[int], positions: npt.NDArray[np.int32]) -> SampledTokens:
        """logits [S, V] float32, overwritten; rows [S]; positions [S]: of the tokens being sampled."""
        states = [self._rows[row] for row in rows]
        raw_best, raw_choice = logits.max(dim=-1)  # the first of equals; a NaN wins and is seen
        failed = ~torch.isfinite(raw_best).numpy()
        raw = {i: logits[i].clone() for i, state in enumerate(states) if state.params.logprobs is not None}
        processed = [i for i, state in enumerate(states) if self._process(logits[i], state, int(positions[i]))]
        token_ids = raw_choice.numpy().copy()
        greedy = [i for i in processed if states[i].params.is_greedy]
        if greedy:
            token_ids[greedy] = logits[greedy].argmax(dim=-1).numpy()
        random = [i for i, state in enumerate(states) if not state.params.is_greedy and not failed[i]]
        if random:
            token_ids[random] = self._draw(logits[random], [states[i] for i in random], positions[random])
        for i, state in enumerate(states):
            if state.counts is not None:
                state.counts[token_ids[i]] += 1
        logprobs = [
            _token_logprobs(raw[i], int(token_ids[i]), state.params.logprobs or 0) if i in raw else None
            for i, state in enumerate(states)
        ]
        return SampledTokens(token_ids, logprobs, failed)

    def _process(self, logits: torch.Tensor, state: _Row, position: int) -> bool:
        """Apply bias, bans and penalties to one row [V] in place; returns whether there were any."""
        changed = False
        if state.bias is not None:
            ids, values = state.bias
            logits[ids] += values
            changed = True
        if state.banned is not None and position - state.num_prompt_tokens < state.params.min_tokens:
            logits[state.banned] = float("-inf")
            changed = True
        if state.counts is not None and state.in_prompt is not None:
            self._penalise(logits, state.params, state.counts, state.in_prompt)
            changed = True
        return changed

    @staticmethod
    def _penalise(logits: torch.Tensor, params: SamplingParams, counts: torch.Tensor, in_prompt: torch.Tensor) -> None:
        if params.repetition_penalty != 1.0:
            seen = in_prompt | (counts > 0)
            penalty = params.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(seen, penalised, logits))
        if params.frequency_penalty:
            logits -= params.frequency_penalty * counts
        if params.presence_penalty:
            logits -= params.presence_penalty * (counts > 0)

    def _draw(
        self, logits: torch.Tensor, states: Sequence[_Row], positions: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        """Draw from rows [S, V] by inverting their cumulative distributions at one uniform number each."""
        params = [state.params for state in states]
        noise = uniform(
            np.array([state.seed for state in states], dtype=np.int64).astype(np.uint64),
            np.array([state.choice for state in states], dtype=np.uint32),
            positions.astype(np.uint32),
        )
        temperature = torch.tensor([p.temperature for p in params]).unsqueeze(1)
        probs = torch.softmax(logits / temperature, dim=-1)
        token_ids = np.empty(len(states), dtype=np.int64)
        free = [i for i, p in enumerate(params) if not _filters(p)]
        if free:
            token_ids[free] = _invert(probs[free].double(), noise[free])
        filtered = [i for i, p in enumerate(params) if _filters(p)]
        for width in (min(NUM_CANDIDATES, probs.shape[1]), probs.shape[1]):
            if not filtered:
                break
            kept, candidate_ids, complete = _filter(probs[filtered], [params[i] for i in filtered], width)
            done = [i for i, ok in enumerate(complete) if ok]
            if done:
                rows = [filtered[i] for i in done]
                ranks = torch.from_numpy(_invert(kept[done], noise[rows]))
                token_ids[rows] = candidate_ids[done].gather(1, ranks.unsqueeze(1)).squeeze(1).numpy()
            filtered = [row for row, ok in zip(filtered, complete, strict=True) if not ok]
        return token_ids


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _filter(
    probs: torch.Tensor, params: Sequence[SamplingParams], width: int
) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """Apply min_p, top_k and top_p to the `width` most likely tokens of rows [S, V].

    Returns probabilities [S, width] float64 with zeros where a token is filtered out, the tokens' ids [S, width], most
    likely first and the lower id first among equals, and for each row whether `width` tokens were enough to tell.
    """
    vocab_size = probs.shape[1]
    top, ids = probs.topk(width, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    top, by_prob = top.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids, top = ids.gather(1, by_prob), top.double()
    ranks = torch.arange(width)
    top_k = torch.tensor([p.top_k if p.top_k > 0 else vocab_size for p in params]).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64).unsqueeze(1)
    keep = (top >= min_p * top[:, :1]) & (ranks < top_k)
    closed = (top_k <= width) | ~keep[:, -1:]  # no token beyond `width` passes min_p and top_k
    kept = top * keep
    cumulative = kept.cumsum(dim=-1)
    # Where every passing token is at hand, top_p is a share of theirs; otherwise of the whole distribution.
    total = torch.where(closed, cumulative[:, -1:], torch.ones_like(top_p))
    nucleus = (cumulative - kept < top_p * total) | (ranks == 0)
    needs_whole = ~closed & (min_p > 0)
    complete = closed | (width == vocab_size) | (~needs_whole & (cumulative[:, -1:] >= top_p) & (top_p < 1.0))
    return kept * nucleus, ids, complete.squeeze(1).tolist()


def _invert(probs: torch.Tensor, noise: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The first index of each row [S, N] float64 whose cumulative sum exceeds the row's noise times its total."""
    cumulative = probs.cumsum(dim=-1)
    target = torch.from_numpy(noise).unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    last_possible = (probs > 0).long().cumsum(dim=-1).argmax(dim=-1)  # rounding must not choose beyond it
    return torch.minimum(index, last_possible).numpy()


def _token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one row [V] of raw logits."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs[token_id]
    rank = int((logprobs > chosen).sum()) + 1
    top: list[tuple[int, float]] = []
    if num_top:
        values, ids = logprobs.topk(min(num_top, len(logprobs)))
        top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda entry: (-entry[1], entry[0]))
    return TokenLogprobs(float(chosen), rank, top)

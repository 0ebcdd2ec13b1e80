"""BeamSearch: which continuations of a prompt live on, and which finished ones are best.

Knows tokens and log-probabilities; knows nothing of requests, blocks or steps. Ranks and ends as transformers'
`generate` does with `num_beams`, so that tokens and scores are the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from octavo.core.step import FinishReason, TokenLogprobs
from octavo.sampling_params import BeamSearchOptions

__all__ = ["MAX_CANDIDATES", "Beam", "BeamSearch", "Hypothesis", "num_candidates"]


MAX_CANDIDATES = 1 << 15
"""Continuations that a search may look at in a step: others wait as long as that takes. Enough for 128 beams."""


def num_candidates(width: int, num_end_tokens: int) -> int:
    """How many continuations of each beam are looked at: enough for `width` to go on even if all others end."""
    return max(2 * width, width + num_end_tokens)


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation that lives."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a token, with as many alternatives as there were candidates."""
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that ended."""

    beam: Beam
    score: float
    """cumulative_logprob / length ** length_penalty, the length in generated tokens."""
    finish_reason: FinishReason


class BeamSearch:
    """Invariants: until it is done there are `width` beams, all of one length, best first; `hypotheses` has the best of
    those that ended, at most `width`, best first."""

    def __init__(self, width: int, options: BeamSearchOptions, max_tokens: int, end_token_ids: frozenset[int]) -> None:
        self.width = width
        self.options = options
        self.max_tokens = max_tokens
        self.end_token_ids = end_token_ids
        self.beams = [Beam() for _ in range(width)]
        self.hypotheses: list[Hypothesis] = []
        self.is_done = False
        self._num_tokens = 0

    @property
    def num_candidates(self) -> int:
        """Of each beam."""
        return num_candidates(self.width, len(self.end_token_ids))

    def advance(self, rows: Sequence[TokenLogprobs]) -> list[tuple[int, int]]:
        """One token more. rows: each beam's next tokens, its `top` holding at least `num_candidates` of them.

        Returns each new beam as (index of the beam that it continues, token); nothing once the search is done.
        """
        rows = rows[:1] if not self._num_tokens else rows  # all begin alike
        self._num_tokens += 1
        # (total, -beam, -rank, token): the largest is best, and of equals the first.
        candidates = [
            (self.beams[index].cumulative_logprob + logprob, -index, -rank, token_id)
            for index, row in enumerate(rows)
            for rank, (token_id, logprob) in enumerate(row.top[: self.num_candidates])
        ]
        is_last = self._num_tokens == self.max_tokens
        for total, minus_index, minus_rank, token_id in nlargest(self.width, candidates):
            if is_last or token_id in self.end_token_ids:
                self._add(self._continued(self.beams[-minus_index], rows[-minus_index], -minus_rank, total))
        living = (candidate for candidate in candidates if candidate[-1] not in self.end_token_ids)
        going_on: list[tuple[int, int]] = []
        beams: list[Beam] = []
        for total, minus_index, minus_rank, token_id in nlargest(self.width, living):
            beams.append(self._continued(self.beams[-minus_index], rows[-minus_index], -minus_rank, total))
            going_on.append((-minus_index, token_id))
        self.is_done = is_last or not self._can_improve(beams[0].cumulative_logprob)
        if self.is_done:
            return []
        self.beams = beams
        return going_on

    @staticmethod
    def _continued(beam: Beam, row: TokenLogprobs, rank: int, total: float) -> Beam:
        token_id, logprob = row.top[rank]
        return Beam([*beam.token_ids, token_id], [*beam.logprobs, TokenLogprobs(logprob, rank + 1, row.top)], total)

    def _add(self, beam: Beam) -> None:
        reason: FinishReason = "stop" if beam.token_ids[-1] in self.end_token_ids else "length"
        hypothesis = Hypothesis(beam, self._score(beam.cumulative_logprob, self._num_tokens), reason)
        merged = sorted([*self.hypotheses, hypothesis], key=lambda hypothesis: -hypothesis.score)
        self.hypotheses = merged[: self.width]

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        return cumulative_logprob / math.pow(num_tokens, self.options.length_penalty)

    def _can_improve(self, best: float) -> bool:
        """Whether the best living beam may still become better than the worst hypothesis, at its present length or,
        with "never" and a penalty that favours long ones, at its longest."""
        options = self.options
        if len(self.hypotheses) < self.width:
            return True
        if options.early_stopping is True:
            return False
        at_longest = options.early_stopping == "never" and options.length_penalty > 0
        return self._score(best, self.max_tokens if at_longest else self._num_tokens) > self.hypotheses[-1].score

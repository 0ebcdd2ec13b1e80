"""Beams: the beam searches under way, each a group of requests whose tokens it chooses.

Knows which requests are a search's beams, and moves their tokens and blocks; the choice is `beam_search.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.beam_search import BeamSearch, Hypothesis
from octavo.core.forecast import Forecast
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.preemption import Preemption
from octavo.core.request import Request
from octavo.core.step import TokenLogprobs
from octavo.core.totals import Totals
from octavo.core.waiting_queue import WaitingQueue

__all__ = ["Beams"]


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    search: BeamSearch
    beams: Sequence[Request]
    """Which beam of the search a request is changes from token to token."""
    num_candidates: int
    num_logprobs: int | None
    """Alternatives that are returned beside each token; None: no log-probabilities at all."""
    rows: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By request, the candidates for its next token, as far as they have come."""

    def shown(self, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs] | None:
        if self.num_logprobs is None:
            return None
        return [TokenLogprobs(row.logprob, row.rank, row.top[: self.num_logprobs]) for row in logprobs]


class Beams:
    """A beam's `max_tokens` is always one more than it has been given: no token is accepted that it samples, it reports
    candidates, and is given one of them, or another beam's tokens, when all beams of its search have reported.

    Invariants: a search is known under each of its requests from `open` to `close`; a beam that has reported has no
    step in flight, and computes nothing until it is given a token.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        waiting: WaitingQueue,
        running: dict[int, Request],
        totals: Totals,
        forecast: Forecast,
        preemption: Preemption,
    ) -> None:
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._totals = totals
        self._forecast = forecast
        self._preemption = preemption
        self._open: dict[int, _Open] = {}
        self._complete: list[_Open] = []  # searches whose beams have all reported
        self._given_from: dict[int, int] = {}  # by beam, the position from which on the runner does not know its tokens

    def __len__(self) -> int:
        return len(self._open)

    def open(self, beams: Sequence[Request], search: BeamSearch, num_logprobs: int | None) -> None:
        opened = _Open(search, beams, max(search.num_candidates, num_logprobs or 0), num_logprobs)
        self._open.update({beam.request_id: opened for beam in beams})

    def close(self, request: Request) -> Sequence[Request]:
        """Forget the search that the request belongs to. Returns all requests of it, or the one that is in none."""
        opened = self._open.get(request.request_id)
        if opened is None:
            return [request]
        for beam in opened.beams:
            del self._open[beam.request_id]
            self._given_from.pop(beam.request_id, None)
        if opened in self._complete:
            self._complete.remove(opened)
        return opened.beams

    def num_candidates(self, request_id: int) -> int:
        """How many tokens a beam reports at each position; 0 of any other request."""
        opened = self._open.get(request_id)
        return 0 if opened is None else opened.num_candidates

    def await_token(self, request: Request) -> bool:
        """Whether it is a beam whose candidates were reported."""
        opened = self._open.get(request.request_id)
        return opened is not None and request.request_id in opened.rows

    def take(self, request: Request, logprobs: list[TokenLogprobs] | None) -> bool:
        """The candidates of a step, if the request is a beam; returns whether it is."""
        opened = self._open.get(request.request_id)
        if opened is None:
            return False
        assert logprobs is not None
        (opened.rows[request.request_id],) = logprobs
        if len(opened.rows) == len(opened.beams):
            self._complete.append(opened)
        return True

    def take_given_from(self, request_id: int) -> int | None:
        """Position from which on the runner must be told the request's tokens, if it must."""
        return self._given_from.pop(request_id, None)

    def advance(self) -> list[tuple[Request, Hypothesis, list[TokenLogprobs] | None]]:
        """Choose tokens where all of a search have reported. Returns what that ends: each beam of a search with an
        output, best first, and the log-probabilities to show."""
        ended = []
        complete, self._complete = self._complete, []
        for opened in complete:
            chosen = opened.search.advance([opened.rows[beam.request_id] for beam in opened.beams])
            opened.rows.clear()
            if opened.search.is_done:
                self.close(opened.beams[0])
                for beam, hypothesis in zip(opened.beams, opened.search.hypotheses, strict=True):
                    ended.append((beam, hypothesis, opened.shown(hypothesis.beam.logprobs)))
            else:
                self._extend(opened.beams, chosen)
        return ended

    def _extend(self, beams: Sequence[Request], chosen: Sequence[tuple[int, int]]) -> None:
        """Give each beam its source's tokens and one more, and the source's blocks where both run: all at once, since a
        beam may be both.

            running beam, from a running one      shares its blocks
            running beam, from a waiting one      starts anew: there are no blocks to share
            waiting beam, from another            will find in the cache what it finds
        """
        moved = [
            (
                [*beams[source].token_ids, token_id],
                list(self._kv.index.known_hashes(beams[source].request_id)),
                beams[source].num_computed_tokens,
            )
            for source, token_id in chosen
        ]
        forks: list[tuple[Request, Request]] = []
        left_alone: list[Request] = []
        for beam, (source_index, _) in zip(beams, chosen, strict=True):
            source = beams[source_index]
            if source is beam:
                continue
            if beam.request_id not in self._running:
                self._kv.free(beam)  # what may be kept in the tier
            elif source.request_id in self._running:
                forks.append((beam, source))
            else:
                left_alone.append(beam)
        self._kv.fork(forks)
        for beam, source in forks:
            self._forecast.share(beam, source.num_computed_tokens)
        for beam in left_alone:
            self._preemption.start_anew(beam)
        for beam, (token_ids, hashes, num_computed_tokens) in zip(beams, moved, strict=True):
            self._give(beam, token_ids)
            self._kv.index.set_hashes(beam.request_id, hashes)
            beam.num_computed_tokens = num_computed_tokens if beam.request_id in self._running else 0
            self._waiting.recheck(beam)
        self._totals.generation_tokens += len(moved)

    def _give(self, beam: Request, token_ids: list[int]) -> None:
        old, first = beam.token_ids, beam.num_prompt_tokens
        num_same = next((i for i in range(first, len(old)) if old[i] != token_ids[i]), len(old))
        self._given_from[beam.request_id] = min(self._given_from.get(beam.request_id, num_same), num_same)
        beam.token_ids = token_ids
        beam.max_tokens = beam.num_output_tokens + 1

    def check(self, requests: dict[int, Request]) -> None:
        """Assert the invariants, `requests` being all that are waiting, running or in a step."""
        assert not self._complete
        assert self._given_from.keys() <= self._open.keys()
        for request_id, opened in self._open.items():
            beam = requests[request_id]
            assert beam.finish_reason is None
            assert beam in opened.beams
            assert beam.max_tokens == (beam.num_output_tokens + 1 if beam.num_output_tokens else 0)
            assert request_id not in opened.rows or not beam.num_steps_in_flight

"""BeamSearches: the beam searches of an engine, each a group of requests whose tokens it chooses.

Knows which requests are a search's beams; the choice is `core/beam_search.py`'s, the blocks are the scheduler's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from octavo.core.beam_search import BeamSearch
from octavo.core.scheduler import Scheduler
from octavo.core.step import RequestDelta, TokenLogprobs

__all__ = ["BeamSearches"]


@dataclass(frozen=True, slots=True)
class _Open:
    search: BeamSearch
    request_ids: Sequence[int]
    """One a beam. Which beam a request is changes from token to token."""
    num_logprobs: int | None
    """Alternatives that are returned beside each token; None: no log-probabilities at all."""
    rows: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By request, the candidates for its next token, as far as they have come."""

    def shown(self, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs] | None:
        if self.num_logprobs is None:
            return None
        return [TokenLogprobs(row.logprob, row.rank, row.top[: self.num_logprobs]) for row in logprobs]


class BeamSearches:
    """Invariant: a search is known under each of its requests from `open` until its last deltas are out, or `close`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._open: dict[int, _Open] = {}

    def open(self, request_ids: Sequence[int], search: BeamSearch, num_logprobs: int | None) -> None:
        opened = _Open(search, request_ids, num_logprobs)
        self._open.update(dict.fromkeys(request_ids, opened))

    def close(self, request_id: int) -> Sequence[int]:
        """Forget the search that the request belongs to. Returns all requests of it, or the one that is in none."""
        opened = self._open.get(request_id)
        if opened is None:
            return [request_id]
        for beam_id in opened.request_ids:
            del self._open[beam_id]
        return opened.request_ids

    def collect(self, deltas: list[RequestDelta]) -> list[RequestDelta]:
        """Take the beams' candidates out of a step's deltas, and choose tokens where all of a search have come. Put in
        what that ends: one delta a beam, best first. A beam that failed ends its search."""
        if not self._open:
            return deltas
        shown = []
        for delta in deltas:
            opened = self._open.get(delta.request_id)
            if opened is None:
                shown.append(delta)
            elif delta.logprobs is None:
                shown.append(delta)
                for beam_id in self.close(delta.request_id):
                    shown += self._scheduler.fail(beam_id, delta.error or "")
            else:
                (opened.rows[delta.request_id],) = delta.logprobs
                if len(opened.rows) == len(opened.request_ids):
                    shown += self._advance(opened)
        return shown

    def _advance(self, opened: _Open) -> list[RequestDelta]:
        ids = opened.request_ids
        chosen = opened.search.advance([opened.rows[request_id] for request_id in ids])
        opened.rows.clear()
        if not opened.search.is_done:
            self._scheduler.extend(
                [(request_id, ids[source], token) for request_id, (source, token) in zip(ids, chosen, strict=True)]
            )
            return []
        self.close(ids[0])
        return [
            structs.replace(
                self._scheduler.end(request_id, hypothesis.finish_reason, hypothesis.beam.token_ids),
                logprobs=opened.shown(hypothesis.beam.logprobs),
                score=hypothesis.score,
            )
            for request_id, hypothesis in zip(ids, opened.search.hypotheses, strict=True)
        ]

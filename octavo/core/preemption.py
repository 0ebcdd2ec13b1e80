"""Preemption: who gives up blocks for whom, and whether they are computed anew or swapped.

Knows running and waiting requests and their blocks; knows no steps.
"""

from bisect import bisect_left
from collections.abc import Sequence, Set

from octavo.core.block_tables import Tables
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.swap_cost import PreemptionChoice
from octavo.core.totals import Totals
from octavo.core.waiting_queue import WaitingQueue

__all__ = ["Preemption"]

NOBODY: Set[int] = frozenset()


class Preemption:
    """A preempted request keeps its tokens; its blocks are freed, and it waits again.

    Invariant: a request with a step in flight is not preempted. By priority, `running` is in order of urgency after
    `make_way`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        waiting: WaitingQueue,
        running: dict[int, Request],
        totals: Totals,
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._totals = totals

    # ---- one request

    def preempt(self, request: Request) -> None:
        """Free, forget, requeue: its tokens are kept, and are computed anew, or copied back, when it is next."""
        if self._choice(request) == "recompute" or not self._kv.swap_out(request):
            self.start_anew(request)
            return
        self._totals.preemptions["swap"] += 1
        self._wait_again(request)

    def start_anew(self, request: Request) -> None:
        """Preempt a request whose blocks are worth nothing."""
        self._totals.preemptions["recompute"] += 1
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Let a request that was just admitted, or is preempted, wait again without any blocks."""
        self._kv.free(request)
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        del self._running[request.request_id]
        self._waiting.add(request)

    def _choice(self, request: Request) -> PreemptionChoice:
        residency, mode = self._kv.residency, self._config.preemption_mode
        if residency is None or mode == "recompute" or not residency.can_swap_out(request):
            return "recompute"
        return "swap" if mode == "swap" else residency.cheaper_preemption(request)

    # ---- blocks for a running request

    def allocate(self, request: Request, num_new_tokens: int) -> Tables | None:
        """Blocks for the next tokens, at the expense of the last of the requests after this one; None when those have
        steps in flight, or there are none."""
        while (new_block_ids := self._kv.tables.allocate(request, num_new_tokens)) is None:
            for last in reversed(self._running.values()):
                if last is request:
                    return None
                if not last.num_steps_in_flight:
                    self.preempt(last)
                    break
        return new_block_ids

    # ---- by priority

    def yields(self, request: Request, claimant: Request) -> bool:
        """Whether a running request may be preempted to admit the claimant: it is less urgent, ageing left out and
        counted in."""
        is_ordered = self._config.scheduling_policy == "priority" and request.priority > claimant.priority
        return is_ordered and self._waiting.urgency(request) > self._waiting.urgency(claimant)

    def make_way(self) -> Set[int]:
        """Order the running requests by urgency, and preempt the last of them for the first that waits, if it is more
        urgent and can then be admitted in this step. Those that have steps in flight must be idle first: until all are,
        none is preempted, lest others take what they give up. Returns those to be left out of the step for that."""
        in_order = sorted(self._running.items(), key=lambda item: self._waiting.urgency(item[1]))
        self._running.clear()
        self._running.update(in_order)
        claimant = self._waiting.first()
        victims = [] if claimant is None else self._victims(claimant)
        if any(victim.num_steps_in_flight for victim in victims):
            return {victim.request_id for victim in victims}
        for victim in victims:
            self.preempt(victim)
        return NOBODY

    def _victims(self, claimant: Request) -> Sequence[Request]:
        """The fewest of the less urgent running requests without which the claimant can be held; none if it can be held
        with them, or not without them either, or if the others leave it no token of the step."""
        prefix = self._kv.match_prefix(claimant)
        candidates = [request for request in reversed(self._running.values()) if self.yields(request, claimant)]
        if not candidates or self._has_room(claimant, prefix, []) or not self._has_room(claimant, prefix, candidates):
            return []
        numbers = range(1, len(candidates) + 1)
        num_victims = 1 + bisect_left(numbers, True, key=lambda n: self._has_room(claimant, prefix, candidates[:n]))
        victims = candidates[:num_victims]
        num_tokens = sum(request.gap for request in self._staying(victims))
        return victims if num_tokens < self._config.max_num_batched_tokens else []

    def _staying(self, without: Sequence[Request]) -> list[Request]:
        gone = {request.request_id for request in without}
        return [request for request in self._running.values() if request.request_id not in gone]

    def _has_room(self, request: Request, prefix: Tables, without: Sequence[Request]) -> bool:
        """Whether the request can be held without these, when the others have taken what their next tokens need."""
        staying = self._staying(without)
        if len(staying) >= self._config.max_num_seqs:
            return False
        num_taken = sum(self._kv.tables.num_missing(other, other.gap) for other in staying)
        return self._kv.can_hold(request, prefix, without, num_taken)

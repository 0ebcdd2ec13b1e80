"""StepPacker: which tokens of running and waiting requests go into the step that is being scheduled.

Knows requests, blocks and the step's budget; knows nothing of results.
"""

from bisect import bisect_left
from collections.abc import Set

from octavo.core.beams import Beams
from octavo.core.block_tables import Tables
from octavo.core.choices import Choices
from octavo.core.forecast import Forecast
from octavo.core.in_flight import InFlight
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.preemption import NOBODY, Preemption
from octavo.core.request import Request
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import NewRequest
from octavo.core.step_builder import StepBuilder
from octavo.core.totals import Totals
from octavo.core.waiting_queue import WaitingQueue

__all__ = ["StepPacker"]


class StepPacker:
    """Running requests come first, in their order, then those that wait, in theirs, while budget, seats and blocks
    last.

    Invariant: the tokens of a step stay within the budget, and every running request that is not held back has one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        waiting: WaitingQueue,
        running: dict[int, Request],
        in_flight: InFlight,
        builder: StepBuilder,
        totals: Totals,
        forecast: Forecast,
        choices: Choices,
        beams: Beams,
        preemption: Preemption,
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._in_flight = in_flight
        self._builder = builder
        self._totals = totals
        self._forecast = forecast
        self._choices = choices
        self._beams = beams
        self._preemption = preemption

    def pack(self) -> bool:
        """Put into the step what can be computed now. Returns whether there is anything to do."""
        self._fill()
        while not (self._builder.entries or self._kv.has_new_copies):
            idle = next(filter(self._beams.await_token, reversed(self._running.values())), None)
            if self._in_flight or idle is None:
                return False
            self._preemption.preempt(idle)  # a beam that only waits may hold what others need
            self._fill()
        return True

    def _fill(self) -> None:
        is_ordered = self._config.scheduling_policy == "priority"
        token_budget = self._schedule_running(self._preemption.make_way() if is_ordered else NOBODY)
        self._admit_waiting(token_budget)

    def _schedule_running(self, held_back: Set[int]) -> int:
        """Give the running requests their tokens, in order, but for those held back. Returns the budget left for
        admission: none when blocks were short.

        Every decode has its token, whatever a chunk before it could take. A chunk that does not end its prompt leaves
        no budget to admit others.
        """
        token_budget = self._config.max_num_batched_tokens
        left_out = held_back | self._in_flight.waiting_ids
        running = [r for r in self._running.values() if r.request_id not in left_out]
        num_behind = len(running)
        for request in running:
            num_behind -= 1
            num_new_tokens = request.gap
            if num_new_tokens > 1:
                num_new_tokens = min(num_new_tokens, token_budget, max(token_budget - num_behind, 1))
            if not num_new_tokens or request.request_id not in self._running:
                continue
            num_taken = self._advance(request, num_new_tokens)
            if num_taken is None:
                return 0  # those after it stay idle, so that they can be preempted
            token_budget -= num_taken
        return token_budget

    def _advance(self, request: Request, num_new_tokens: int) -> int | None:
        """Put the next tokens of a running request into the step. Returns how many: none where its blocks must be
        copied first, None where blocks are short."""
        residency = self._kv.residency
        if residency is not None and self._kv.geometry.is_long(request):
            num_new_tokens = min(num_new_tokens, self._kv.geometry.most_new_tokens(request))
            if residency.spill(request, num_new_tokens):
                self._in_flight.wait_for_copies(self._builder.step_id, request)
                return 0
        if request.draft_token_ids:
            num_new_tokens = self._fit_drafts(request, num_new_tokens)
        new_block_ids = self._preemption.allocate(request, num_new_tokens)
        if new_block_ids is None:
            return None
        self._add(request, num_new_tokens, new_block_ids)
        return num_new_tokens

    def _fit_drafts(self, request: Request, num_new_tokens: int) -> int:
        """Drop the drafts that the step has no tokens for, or all of them rather than preempt for their blocks."""
        num_known = len(request.token_ids) - request.num_computed_tokens
        if self._kv.tables.num_missing(request, num_new_tokens) > self._kv.pool.num_free:
            num_new_tokens = min(num_new_tokens, num_known)
        del request.draft_token_ids[max(num_new_tokens - num_known, 0) :]
        return num_new_tokens

    def _admit_waiting(self, token_budget: int) -> None:
        """Start waiting requests that are ready, in order, while they fit. Blocks for all of a request's tokens must be
        free, though only its next chunk's are taken: else it would be preempted before its first token, or start again
        in the step that preempted it."""
        while token_budget and self._num_seats:
            request = self._waiting.first()
            if request is None:
                return
            prefix = self._kv.match_prefix(request)
            if not self._kv.geometry.windows and request.gap > token_budget:
                return  # an encoder's prompt is scheduled whole
            if not self._kv.can_hold(request, prefix) or not self._will_fit(request, prefix, 1):
                return
            self._waiting.remove(request.request_id)
            self._running[request.request_id] = request
            request.num_computed_tokens = self._kv.open(request, prefix)
            if self._kv.is_loading(request, prefix):
                self._in_flight.wait_for_copies(self._builder.step_id, request)
                continue
            num_taken = self._advance(request, min(request.gap, token_budget))
            if num_taken is None:  # the tier has no room for the rest of a long request
                self._preemption.put_back(request)
                return
            token_budget -= num_taken

    @property
    def _num_seats(self) -> int:
        """How many requests more may run: each has a token in every step."""
        return min(self._config.max_num_seqs, self._config.max_num_batched_tokens) - len(self._running)

    def _will_fit(self, request: Request, prefix: Tables, num_alike: int) -> bool:
        if self._config.admission_policy == "greedy":
            return True
        running = self._running.values()
        staying = (other for other in running if not self._preemption.yields(other, request))
        return self._forecast.fits(request, prefix, running, staying, num_alike)

    def _fork_followers(self, leader: Request) -> None:
        """The leader's prompt is in this step to its end: those who waited for it begin here, with its blocks, and
        sample from the same logits. For whom there is no room now is admitted later, like any other: each must have
        a seat, a block in each group to write its next token to, and the forecast's consent."""
        followers, prefix = self._choices.take_followers(leader), self._kv.tables.copy(leader.request_id)
        has_tail = leader.num_computed_tokens % self._config.block_size > 0  # the last to write on keeps it
        num_writers = self._kv.pool.num_free // len(prefix) + has_tail
        numbers = range(1, min(len(followers), self._num_seats, num_writers - 1) + 1)
        num_forks = bisect_left(numbers, True, key=lambda n: not self._will_fit(followers[0], prefix, n))
        for follower in followers[:num_forks]:
            self._waiting.remove(follower.request_id)
            self._running[follower.request_id] = follower
            self._kv.fork([(follower, leader)])
            self._choices.fork(follower, leader)
            follower.num_computed_tokens = leader.num_computed_tokens
            self._add(follower, 0, ())
        for follower in followers[num_forks:]:
            self._waiting.recheck(follower)

    def _add(self, request: Request, num_new_tokens: int, new_block_ids: Tables) -> None:
        """Put a request into the step and advance its ledger."""
        request_id, builder = request.request_id, self._builder
        if request_id in self._kv.tables.replaced:
            self._kv.tables.replaced.discard(request_id)
            new_block_ids = self._kv.tables.copy(request_id)
            if builder.knows(request_id):
                builder.reset(request_id)
            else:
                self._introduce(request)
        first_position = request.num_computed_tokens
        request.num_computed_tokens = end = first_position + num_new_tokens
        num_logits = 0
        if end == request.num_tokens:
            num_logits = 1 + len(request.draft_token_ids)
            if num_logits == 1 and not self._config.keeps_back_unsampled:
                request.num_placeholders += 1
        given_from = self._beams.take_given_from(request_id) if self._beams else None
        builder.add(request, first_position, num_new_tokens, num_logits, new_block_ids, given_from)
        request.num_steps_in_flight += 1
        if end % self._config.block_size < num_new_tokens:  # a block may have become full
            self._kv.register_full_blocks(request, are_written=False)
        if num_logits and self._choices.has_groups and self._choices.has_followers(request):
            self._fork_followers(request)

    def _introduce(self, request: Request) -> None:
        """Tell the runner of a request that it does not know."""
        self._forecast.begin(request)
        self._totals.prompt_tokens += request.num_prompt_tokens
        params, leader = request.sampling_params, self._choices.leader_of(request)
        num_cached_tokens = request.num_computed_tokens
        if leader is None:
            is_looked_up = self._kv.index.is_enabled and not request.skips_prefix_cache
            residency = self._kv.residency
            num_tier_tokens = residency.take_num_found(request.request_id) if residency is not None else 0
            self._totals.count_cached(request, num_tier_tokens, is_looked_up)
        else:
            num_cached_tokens = self._builder.num_cached_tokens[leader.request_id]
            if params.prompt_logprobs is not None:
                params = params.without_prompt_logprobs()  # the leader's are shared
        self._builder.introduce(
            NewRequest(
                request.request_id,
                request.prompt_token_ids,
                params,
                request.seed,
                request.choice,
                request.stop_token_ids,
                self._beams.num_candidates(request.request_id),
            ),
            num_cached_tokens,
        )

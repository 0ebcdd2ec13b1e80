"""Scheduler: which tokens of which requests the next step computes, and what became of those that were computed.

One ledger, no phases: prefill, chunks, decode, prefix hits and resuming are sizes of a request's gap. Knows nothing of
text, time, devices or processes.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain

from octavo.core.dependents import find_dependents
from octavo.core.eviction import make_eviction_policy
from octavo.core.forecast import Forecast
from octavo.core.kv_cache_manager import BlockTables, KVCacheManager
from octavo.core.request import Request
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.scheduler_stats import SchedulerStats
from octavo.core.siblings import follow, leave, take_followers
from octavo.core.step import (
    FinishReason,
    GivenTokens,
    ModelRunnerOutput,
    NewRequest,
    RequestDelta,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.core.step_builder import StepBuilder
from octavo.core.swap_cost import PreemptionChoice, SwapCost
from octavo.core.totals import Totals
from octavo.core.waiting_queue import WaitingQueue

__all__ = ["Scheduler"]

AGEING_STEPS = 256
"""A request that has waited for this many steps more is as urgent as one of the next lower priority value."""


class Scheduler:
    """The requests of one engine, first come, first served, or by priority.

    By priority the order is that of priority · AGEING_STEPS + the step of arrival: every request ages at the same rate,
    so the order between two of them never changes, and one waits for later ones of priority p, in steps, no longer than
    (its priority - p) · AGEING_STEPS.

    Invariants: a request that is not finished is in exactly one of waiting and running; one with a step in flight is
    not preempted and keeps its blocks, finished or not, until its last step returns; the first running request can
    always proceed once the steps in flight have returned, since it may preempt every other one and fits alone. One that
    waits for its blocks to be copied counts the step that does it as one of its own in flight, and is in no other.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._swap_cost = SwapCost(config.prefill_tokens_per_s, config.copy_bytes_per_s)
        self._kv = KVCacheManager(
            config.num_blocks,
            config.block_size,
            config.group_windows,
            config.enable_prefix_caching,
            config.max_num_batched_tokens,
            make_eviction_policy(config.kv_eviction_policy, config.seed),
            config.num_swap_blocks,
            keeps_evicted=self._swap_cost.choose(config.block_size, 2 * config.block_bytes) == "swap",
        )
        self._kv_capacity_tokens = config.kv_capacity_tokens
        self._requests: dict[int, Request] = {}  # waiting, running, and finished with steps in flight
        self._waiting = WaitingQueue()
        self._running: dict[int, Request] = {}  # in order of admission; with priorities, of urgency at the last step
        self._forecast = Forecast(self._kv)
        self._in_flight: dict[int, SchedulerOutput] = {}  # by step id, in order
        self._forgotten_request_ids: list[int] = []  # the runner has yet to be told
        self._copied_for: dict[int, list[int]] = {}  # by step id: running requests that wait for its copies
        self._stale_table_ids: set[int] = set()  # running requests whose whole table the runner has yet to be told
        self._num_steps = 0
        self._totals = Totals()

    # ---- requests in and out

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of one request that can be held now: a tier that failed counts no more."""
        return self._kv.pool_tokens if self._kv.tier.is_closed else self._kv_capacity_tokens

    @property
    def is_tier_closed(self) -> bool:
        """Whether the tier failed, so that nothing is swapped any more."""
        return self._kv.tier.is_closed

    def add_request(self, request: Request, is_ready: bool = True, leader: Request | None = None) -> None:
        """Queue a request that `RequestLimits` let pass. Until it is ready those behind it go first.

        With a `leader`, a request of the same prompt that was added since the last step, the prompt is computed once.
        """
        assert request.request_id not in self._requests
        assert request.most_computed_tokens <= self._kv_capacity_tokens
        self._totals.received += 1
        level = request.priority * AGEING_STEPS + self._num_steps if self.config.scheduling_policy == "priority" else 0
        request.urgency = (level, self._totals.received)
        request.waits_for_grammar = not is_ready
        if leader is not None:
            follow(request, leader)
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def make_ready(self, request_id: int) -> None:
        """Let a request that waited for its grammar be scheduled; one that is finished is ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.finish_reason is None:
            request.waits_for_grammar = False
            self._waiting.recheck(request.leader or request)

    def fail(self, request_id: int, message: str) -> list[RequestDelta]:
        """End a request that can't be computed; one that is finished is ignored."""
        request = self._requests.get(request_id)
        return self._fail(request, message) if request is not None else []

    def abort(self, request_id: int) -> None:
        """End a request in whatever state it is; an unknown or finished one is ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.finish_reason is None:
            self._finish(request, "abort")

    def finish(self, request_id: int, reason: FinishReason, num_tokens: int) -> None:
        """End a request at `num_tokens` output tokens, where its reader found the end: later ones don't count.

        An unknown or finished request is ignored.
        """
        request = self._requests.get(request_id)
        if request is not None and request.finish_reason is None:
            self._totals.generation_tokens -= request.truncate(num_tokens)
            self._finish(request, reason)

    def extend(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Give beams that await it their next token, all at once: (request id, source id, token). A beam goes on from
        its source: takes over its tokens and, where both have them, its blocks."""
        forks: list[tuple[Request, Request]] = []
        left_alone: list[Request] = []
        moved = []
        for request_id, source_id, token_id in moves:
            request, source = self._requests[request_id], self._requests[source_id]
            token_ids, block_hashes = [*source.token_ids, token_id], list(source.block_hashes)
            moved.append((request, token_ids, block_hashes, source.num_computed_tokens))
            if source is request:
                continue
            if request_id not in self._running:
                self._kv.free(request)  # what may be kept in the tier
            elif source_id in self._running:
                forks.append((request, source))
            else:
                left_alone.append(request)
        self._kv.fork(forks)
        for request, source in forks:
            request.num_shared_tokens = source.num_computed_tokens
        for request in left_alone:
            self._kv.free(request)
            self._totals.preemptions["recompute"] += 1
            self._requeue(request)
        for request, token_ids, block_hashes, num_computed_tokens in moved:
            request.give(token_ids)
            request.block_hashes = block_hashes
            request.num_computed_tokens = num_computed_tokens if request.request_id in self._running else 0
            self._waiting.recheck(request)
        self._totals.generation_tokens += len(moved)

    def end(self, request_id: int, reason: FinishReason, output_token_ids: list[int]) -> RequestDelta:
        """End a beam, whatever it was, with this output."""
        request = self._requests[request_id]
        self._totals.generation_tokens += len(output_token_ids) - request.num_output_tokens
        request.token_ids[request.num_prompt_tokens :] = output_token_ids
        self._finish(request, reason)
        return RequestDelta(
            request_id,
            output_token_ids,
            finish_reason=reason,
            stop_reason=request.stop_reason_of(output_token_ids[-1]) if reason == "stop" else None,
            num_cached_tokens=request.num_cached_tokens,
        )

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work and count it as computed. An empty output is not to be submitted; any other must
        come back through `update` or `fail_step`."""
        builder = StepBuilder(self._num_steps)
        self._fill(builder)
        while not (builder.entries or self._kv.tier.has_new_copies):
            if self._in_flight or not self._preempt_idle():
                return builder.build([], [])
            self._fill(builder)
        forgotten, self._forgotten_request_ids = self._forgotten_request_ids, []
        step = builder.build(forgotten, self._kv.begin_step(builder.step_id))
        self._in_flight[step.step_id] = step
        self._num_steps += 1
        return step

    def update(self, scheduler_output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestDelta]:
        """Accept what a step sampled; steps return in order. Results of requests that finished meanwhile are dropped.

        A request in `result.failed` fails alone, and its blocks are not shared any further. One that shares them
        already goes on: a NaN in keys or values it reads shows in its own logits.
        """
        assert next(iter(self._in_flight)) == scheduler_output.step_id
        if scheduler_output.copies:
            self._settle_copies(scheduler_output, set(result.failed_copies), is_at_fault=True)
        self._observe_times(scheduler_output, result)
        deltas = []
        prompt_logprobs = dict(result.prompt_logprobs)
        for request_id, rows in prompt_logprobs.items():
            if (kept := self._requests[request_id].prompt_logprobs) is not None:
                kept += rows
        if result.failed:
            for request_id, message in self._with_forks(result.failed, result.request_ids).items():
                self._kv.forget_prefixes(self._requests[request_id])
                deltas += self._fail(self._requests[request_id], message)
        for request_id, token_ids, logprobs in zip(
            result.request_ids, result.sampled_token_ids, result.logprobs, strict=True
        ):
            request = self._requests[request_id]
            if request.finish_reason is None:
                deltas.append(self._accept(request, token_ids, logprobs, prompt_logprobs.pop(request_id, None)))
        for request_id, rows in prompt_logprobs.items():  # prompts that are not read to their end
            if self._requests[request_id].finish_reason is None:
                deltas.append(RequestDelta(request_id, [], prompt_logprobs=rows))
        for request_id, embedding in result.embeddings.items():
            request = self._requests[request_id]
            if request.finish_reason is None:
                deltas.append(self._accept_embedding(request, embedding))
        self._retire(scheduler_output)
        if self._kv.tier.is_closed:
            deltas += self._fail_unfitting()
        return deltas

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> list[RequestDelta]:
        """End a step that raised, with every request that depends on it: those in it, and those in later steps that
        share a block which the failed ones have written since. The blocks they wrote lose their hashes.

        Such a sharer is failed, not reset: it was admitted after this step, so it has a step in flight itself. The
        step's copies count as not done.
        """
        steps = [step for step in self._in_flight.values() if step.step_id >= scheduler_output.step_id]
        failed, bad_block_ids = find_dependents(steps, self._kv.block_ids, self._copied_for)
        self._settle_copies(scheduler_output, range(len(scheduler_output.copies)), is_at_fault=False)
        self._kv.forget_hashes(bad_block_ids)
        self._forgotten_request_ids += scheduler_output.forgotten_request_ids  # perhaps not read
        deltas = [delta for request_id in failed for delta in self._fail(self._requests[request_id], message)]
        self._retire(scheduler_output)
        return deltas

    # ---- scheduling

    def _fill(self, builder: StepBuilder) -> None:
        held_back = self._make_way() if self.config.scheduling_policy == "priority" else frozenset()
        token_budget = self._schedule_running(builder, held_back)
        self._admit_waiting(builder, token_budget)

    def _make_way(self) -> Set[int]:
        """Order the running requests by urgency, and preempt the last of them for the first that waits, if it is more
        urgent and can then be held. Returns those that have to be idle first, since they have steps in flight."""
        self._running = dict(sorted(self._running.items(), key=lambda item: item[1].urgency))
        claimant = self._waiting.first()
        victims = [] if claimant is None else self._victims(claimant)
        for victim in victims:
            if not victim.num_steps_in_flight:
                self._preempt(victim)
        return {victim.request_id for victim in victims if victim.num_steps_in_flight}

    def _victims(self, claimant: Request) -> list[Request]:
        """The fewest of the less urgent running requests without which the claimant can be held; none if it can be
        held with them, or not without them either."""
        prefix = self._kv.match_prefix(claimant)
        candidates = [request for request in reversed(self._running.values()) if self._yields(request, claimant)]
        if not self._has_room(claimant, prefix, candidates):
            return []
        num_victims = 0
        while not self._has_room(claimant, prefix, candidates[:num_victims]):
            num_victims += 1
        return candidates[:num_victims]

    def _yields(self, request: Request, claimant: Request) -> bool:
        """Whether a running request may be preempted to admit the claimant: it is less urgent, ageing left out and
        counted in."""
        is_ordered = self.config.scheduling_policy == "priority"
        return is_ordered and request.priority > claimant.priority and request.urgency > claimant.urgency

    def _has_room(self, request: Request, prefix: BlockTables, without: list[Request]) -> bool:
        return len(self._running) - len(without) < self.config.max_num_seqs and self._kv.can_hold(
            request, prefix, without
        )

    def _schedule_running(self, builder: StepBuilder, held_back: Set[int]) -> int:
        """Give the running requests their tokens, in order, but for those held back. Returns the budget left for
        admission: none when blocks were short.

        Every decode has its token, whatever a chunk before it could take. A chunk that does not end its prompt leaves
        no budget to admit others.
        """
        token_budget = self.config.max_num_batched_tokens
        running = [request for request in self._running.values() if request.request_id not in held_back]
        for num_behind, request in zip(range(len(running) - 1, -1, -1), running, strict=True):
            if request.request_id not in self._running or (self._copied_for and self._waits_for_copies(request)):
                continue
            num_new_tokens = min(request.gap, token_budget, max(token_budget - num_behind, 1))
            if not num_new_tokens:
                continue
            num_taken = self._advance(builder, request, num_new_tokens)
            if num_taken is None:
                return 0  # those after it stay idle, so that they can be preempted
            token_budget -= num_taken
        return token_budget

    def _advance(self, builder: StepBuilder, request: Request, num_new_tokens: int) -> int | None:
        """Put the next tokens of a running request into the step. Returns how many: none where its blocks must be
        copied first, None where blocks are short."""
        if self._kv.is_long(request):
            num_new_tokens = min(num_new_tokens, self._kv.most_new_tokens(request))
            if self._kv.spill(request, num_new_tokens):
                self._wait_for_copies(builder, request)
                return 0
        new_block_ids = self._allocate_or_preempt(request, num_new_tokens)
        if new_block_ids is None:
            return None
        self._add(builder, request, num_new_tokens, new_block_ids)
        return num_new_tokens

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int) -> BlockTables | None:
        """Blocks for the next tokens, at the expense of the last of the requests after this one; None when those have
        steps in flight, or there are none."""
        while (new_block_ids := self._kv.allocate(request, num_new_tokens)) is None:
            for last in reversed(self._running.values()):
                if last is request:
                    return None
                if not last.num_steps_in_flight:
                    self._preempt(last)
                    break
        return new_block_ids

    def _preempt(self, request: Request) -> None:
        """Free, forget, requeue: its tokens are kept, and are computed anew, or copied back, when it is next."""
        mode = self._preemption_choice(request)
        if mode == "recompute" or not self._kv.swap_out(request):
            mode = "recompute"
            self._kv.free(request)
        self._totals.preemptions[mode] += 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self._stale_table_ids.discard(request.request_id)
        request.num_computed_tokens = 0
        del self._running[request.request_id]
        self._waiting.add(request)

    def _preemption_choice(self, request: Request) -> PreemptionChoice:
        if self.config.preemption_mode == "recompute" or not self._kv.can_swap_out(request):
            return "recompute"
        if self.config.preemption_mode == "swap":
            return "swap"
        num_tokens, num_copies = self._kv.swap_cost(request)
        return self._swap_cost.choose(num_tokens, num_copies * self.config.block_bytes)

    def _preempt_idle(self) -> bool:
        """Preempt the newest beam that only waits for its next token, if there is any: it may hold what others need."""
        idle = next((request for request in reversed(self._running.values()) if request.awaits_token), None)
        if idle is not None:
            self._preempt(idle)
        return idle is not None

    def _admit_waiting(self, builder: StepBuilder, token_budget: int) -> None:
        """Start waiting requests that are ready, in order, while they fit. Blocks for all of a request's tokens must be
        free, though only its next chunk's are taken: else it would be preempted before its first token, or start again
        in the step that preempted it."""
        while token_budget and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.first()
            if request is None:
                return
            prefix = self._kv.match_prefix(request)
            if not self._kv.can_hold(request, prefix) or (not self.config.group_windows and request.gap > token_budget):
                return
            if self.config.admission_policy == "predicted" and not self._will_fit(request, prefix):
                return
            self._waiting.remove(request.request_id)
            self._running[request.request_id] = request
            request.num_computed_tokens = self._kv.open(request, prefix)
            request.num_tier_cached_tokens = self._kv.num_tier_tokens(prefix)
            self._stale_table_ids.add(request.request_id)
            if self._kv.is_loading(request, prefix):
                self._wait_for_copies(builder, request)
                continue
            num_taken = self._advance(builder, request, min(request.gap, token_budget))
            if num_taken is None:  # the tier has no room for the rest of a long request
                self._kv.free(request)
                self._requeue(request)
                return
            token_budget -= num_taken

    def _will_fit(self, request: Request, prefix: BlockTables) -> bool:
        running = self._running.values()
        return self._forecast.fits(request, prefix, running, (r for r in running if not self._yields(r, request)))

    def _fork_followers(self, builder: StepBuilder, leader: Request) -> None:
        """The leader's prompt is in this step to its end: those who waited for it begin here, with its blocks, and
        sample from the same logits. For whom there is no room now is admitted later, like any other."""
        for follower in take_followers(leader):
            if len(self._running) == self.config.max_num_seqs:
                self._waiting.recheck(follower)
                continue
            self._waiting.remove(follower.request_id)
            self._running[follower.request_id] = follower
            self._kv.fork([(follower, leader)])
            follower.block_hashes = list(leader.block_hashes)
            follower.forked_from = leader
            follower.num_computed_tokens = leader.num_computed_tokens
            self._add(builder, follower, 0, ())

    def _announce(self, builder: StepBuilder, request: Request) -> None:
        """Tell the runner of a request that starts, or whose table does."""
        if request.was_scheduled:
            builder.reset_request_ids.append(request.request_id)
            return
        request.was_scheduled = True
        self._forecast.begin(request)
        request.num_shared_tokens = request.num_computed_tokens
        self._totals.prompt_tokens += request.num_prompt_tokens
        params = request.sampling_params
        if request.forked_from is not None:
            request.num_cached_tokens = request.forked_from.num_cached_tokens
            if params.prompt_logprobs is not None:
                params = replace(params, prompt_logprobs=None)  # the leader's are shared
        else:
            self._count_cached_tokens(request)
        builder.new_requests.append(
            NewRequest(
                request.request_id,
                request.prompt_token_ids,
                params,
                request.seed,
                request.choice,
                tuple(sorted(request.stop_token_ids)),
                request.num_candidates,
            )
        )

    def _count_cached_tokens(self, request: Request) -> None:
        """What a request found in the cache when it was admitted first."""
        request.num_cached_tokens = request.num_computed_tokens
        request.num_tier_cached_tokens = min(request.num_tier_cached_tokens, request.num_cached_tokens)
        is_looked_up = self.config.enable_prefix_caching and not request.skips_prefix_cache
        self._totals.count_cached(request, is_looked_up)

    def _add(self, builder: StepBuilder, request: Request, num_new_tokens: int, new_block_ids: BlockTables) -> None:
        """Put a request into the step and advance its ledger."""
        if self._kv.take_replaced(request) or request.request_id in self._stale_table_ids:
            self._stale_table_ids.discard(request.request_id)
            self._announce(builder, request)
            new_block_ids = self._kv.tables(request)
        if request.given_from is not None:
            given = request.token_ids[request.given_from :]
            builder.given_tokens.append(GivenTokens(request.request_id, request.given_from, given))
            request.given_from = None
        first_position = request.num_computed_tokens
        request.num_computed_tokens = end = first_position + num_new_tokens
        samples = end == request.num_tokens
        builder.entries.append(
            ScheduledRequest(request.request_id, first_position, num_new_tokens, int(samples), new_block_ids)
        )
        request.num_placeholders += samples
        request.num_steps_in_flight += 1
        self._kv.register_full_blocks(request, are_written=False)
        if samples and request.followers:
            self._fork_followers(builder, request)

    # ---- copies between pool and tier

    def _waits_for_copies(self, request: Request) -> bool:
        return request.request_id in chain.from_iterable(self._copied_for.values())

    def _wait_for_copies(self, builder: StepBuilder, request: Request) -> None:
        """Leave a running request out until this step, which copies some of its blocks, has returned."""
        request.num_steps_in_flight += 1
        self._copied_for.setdefault(builder.step_id, []).append(request.request_id)

    def _settle_copies(self, step: SchedulerOutput, failed: Collection[int], is_at_fault: bool) -> None:
        for request_id, num_tokens in self._kv.settle(step.step_id, failed, is_at_fault).items():
            self._requests[request_id].num_computed_tokens = num_tokens
        self._stale_table_ids.update(self._copied_for.get(step.step_id, ()))

    def _observe_times(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        if step.copies and result.copy_s > 0:
            num_copies = sum(max(copy) >= self.config.num_blocks for copy in step.copies)  # between pool and tier
            if num_copies:
                self._swap_cost.observe_copies(num_copies * self.config.block_bytes, result.copy_s)
        if result.compute_s > 0 and step.entries:
            self._swap_cost.observe_step(result.compute_s)
        if result.compute_s > 0 and 2 * step.num_tokens >= self.config.max_num_batched_tokens:
            self._swap_cost.observe_prefill(step.num_tokens, result.compute_s)

    def _fail_unfitting(self) -> list[RequestDelta]:
        """Fail requests that are longer than the pool, when the tier has failed that was to hold their rest."""
        going_on = [request for request in self._requests.values() if request.finish_reason is None]
        unfitting = [request for request in going_on if self._kv.is_long(request)]
        return [
            delta
            for request in unfitting
            for delta in self._fail(
                request,
                f"The request has {request.num_tokens} tokens, the KV pool holds {self.kv_capacity_tokens}, and "
                "writing to the tier that held the rest (--kv-cache-dir) has failed.",
            )
        ]

    # ---- results

    def _with_forks(self, failed: Mapping[int, str], request_ids: Sequence[int]) -> dict[int, str]:
        """With those requests that began where a failed one's prompt ends."""
        origins = {request_id: self._requests[request_id].forked_from for request_id in request_ids}
        forks = {i: origin.request_id for i, origin in origins.items() if origin is not None}
        return {**failed, **{i: failed[origin_id] for i, origin_id in forks.items() if origin_id in failed}}

    def _accept(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> RequestDelta:
        request.num_placeholders -= 1
        if request.forked_from is not None:
            prompt_logprobs, request.forked_from = request.forked_from.prompt_logprobs, None
        if request.num_candidates:
            request.awaits_token = True
            return RequestDelta(request.request_id, [], logprobs)
        reason: FinishReason | None = None if request.max_tokens else "length"
        num_accepted = 0
        while num_accepted < len(token_ids) and reason is None:
            reason = request.append(token_ids[num_accepted])
            num_accepted += 1
        self._totals.generation_tokens += num_accepted
        if reason is None:
            self._kv.register_full_blocks(request)
        else:
            self._finish(request, reason)
        return RequestDelta(
            request.request_id,
            token_ids[:num_accepted],
            logprobs[:num_accepted] if logprobs else None,
            reason,
            request.stop_reason,
            request.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )

    def _accept_embedding(self, request: Request, embedding: bytes) -> RequestDelta:
        request.num_placeholders -= 1
        self._finish(request, "stop")
        return RequestDelta(
            request.request_id,
            [],
            finish_reason="stop",
            num_cached_tokens=request.num_cached_tokens,
            embedding=embedding,
        )

    def _fail(self, request: Request, message: str) -> list[RequestDelta]:
        if request.finish_reason is not None:
            return []
        self._finish(request, "error")
        return [
            RequestDelta(
                request.request_id, [], None, "error", num_cached_tokens=request.num_cached_tokens, error=message
            )
        ]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        may_be_ready = leave(request)
        if self._running.pop(request.request_id, None) is None:
            self._waiting.remove(request.request_id)
        if may_be_ready is not None:
            self._waiting.recheck(may_be_ready)
        self._totals.finished[reason] += 1
        if request.max_tokens and request.was_scheduled and reason != "error":
            self._forecast.end(request, reason)
        if not request.num_steps_in_flight:
            self._release(request)

    def _retire(self, step: SchedulerOutput) -> None:
        """A step has returned: what only waited for it can go."""
        del self._in_flight[step.step_id]
        for request_id in self._copied_for.pop(step.step_id, ()):
            request = self._requests[request_id]
            request.num_steps_in_flight -= 1
            if request.finish_reason is not None and not request.num_steps_in_flight:
                self._release(request)
        for entry in step.entries:
            request = self._requests[entry.request_id]
            request.num_steps_in_flight -= 1
            if request.finish_reason is not None:
                if not request.num_steps_in_flight:
                    self._release(request)
            elif self._kv.has_windows:
                self._kv.free_unseen(request, entry.first_position + entry.num_tokens)

    def _release(self, request: Request) -> None:
        self._kv.free(request)
        self._stale_table_ids.discard(request.request_id)
        del self._requests[request.request_id]
        if request.was_scheduled:
            self._forgotten_request_ids.append(request.request_id)

    # ---- looking in

    def stats(self) -> SchedulerStats:
        return self._totals.stats(self.config, self._kv, self._forecast, len(self._waiting), len(self._running))

    def check(self) -> None:
        """Assert the invariants of DESIGN.md section 5."""
        self._kv.check(self._requests)
        num_in_flight = Counter(chain.from_iterable(step.request_ids for step in self._in_flight.values()))
        waiting_for_copies = Counter(chain.from_iterable(self._copied_for.values()))
        assert set(waiting_for_copies.values()) <= {1}
        num_in_flight += waiting_for_copies
        assert num_in_flight.keys() <= self._requests.keys()
        for request_id, request in self._requests.items():
            is_finished = request.finish_reason is not None
            assert (request_id in self._waiting) + (request_id in self._running) + is_finished == 1
            assert request.num_steps_in_flight == num_in_flight[request_id] >= is_finished
            if not is_finished:
                request.check()
        self._waiting.check()
        assert len(self._running) <= self.config.max_num_seqs
        assert self._totals.received == len(self._waiting) + len(self._running) + sum(self._totals.finished.values())
        for step in self._in_flight.values():
            assert not step.is_empty
            assert len(step.request_ids) == len(set(step.request_ids)) <= self.config.max_num_seqs
            assert not step.entries or step.entries[0].num_tokens > 0
            assert step.num_tokens <= self.config.max_num_batched_tokens

"""Scheduler: which tokens of which requests the next step computes, and what became of those that were computed.

One ledger, no phases: prefill, chunks, decode, prefix hits and resuming are sizes of a request's gap. Knows nothing of
text, time, devices or processes.
"""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from octavo.core.eviction import EvictionPolicyName, make_eviction_policy
from octavo.core.kv_cache_manager import BlockTables, KVCacheManager
from octavo.core.kv_groups import capacity_tokens
from octavo.core.length_predictor import LengthPredictor, predicted_peak
from octavo.core.request import Request
from octavo.core.step import (
    FinishReason,
    ModelRunnerOutput,
    NewRequest,
    RequestDelta,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.core.waiting_queue import WaitingQueue

__all__ = ["AdmissionPolicy", "Scheduler", "SchedulerConfig", "SchedulerStats", "SchedulingPolicy"]

SchedulingPolicy = Literal["fcfs", "priority"]
AdmissionPolicy = Literal["predicted", "greedy"]

AGEING_STEPS = 256
"""A request that has waited for this many steps more is as urgent as one of the next lower priority value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits, resolved."""

    max_num_seqs: int
    """Most requests running at once."""
    max_num_batched_tokens: int
    """Most tokens in a step: bounds the time between a running request's tokens. Each has one in every step, so no
    more requests than this run either."""
    num_blocks: int
    """KV-cache blocks, shared by all groups."""
    block_size: int
    """Tokens a block."""
    group_windows: tuple[int, ...] = (0,)
    """For each group of layers with a block table of its own, how many latest positions they see; 0 for all. No groups
    in encoders, which keep nothing between steps: a prompt is scheduled whole, in the first step whose budget has room
    for it."""
    enable_prefix_caching: bool = True
    kv_eviction_policy: EvictionPolicyName = "lru"
    seed: int = 0
    """Of the random eviction policy."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    admission_policy: AdmissionPolicy = "predicted"
    """Whether a request is admitted when the pool will probably hold it to its end, or when it holds it now."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of one request that the whole pool holds; without a pool, that a step holds."""
        if not self.group_windows:
            return self.max_num_batched_tokens
        return capacity_tokens(self.group_windows, self.num_blocks, self.block_size, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The state now, and totals since the start. num_received = num_waiting + num_running + sum of num_finished."""

    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_blocks: int
    num_received: int
    num_finished: dict[FinishReason, int]
    num_preemptions: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache, at first admission."""
    prefix_cache_hits: int
    """Those of them that were found."""
    num_prompt_tokens: int
    """Prompt tokens of admitted requests."""
    num_generation_tokens: int
    """Accepted output tokens; never decreases."""
    num_evicted_blocks: int = 0
    """Cached blocks that were given up for others."""
    num_predicted_tokens: int = 0
    """Output tokens expected, at their admission, of the requests that have ended by `stop` or `length`."""
    num_actual_tokens: int = 0
    """Output tokens of these."""
    num_mispredicted_tokens: int = 0
    """By how many the two differed, added up over these requests."""


class Scheduler:
    """The requests of one engine, first come, first served, or by priority.

    By priority the order is that of priority · AGEING_STEPS + the step of arrival: every request ages at the same rate,
    so the order between two of them never changes, and one waits for later ones of priority p, in steps, no longer than
    (its priority - p) · AGEING_STEPS.

    Invariants: a request that is not finished is in exactly one of waiting and running; one with a step in flight is
    not preempted and keeps its blocks, finished or not, until its last step returns; the first running request can
    always proceed once the steps in flight have returned, since it may preempt every other one and fits alone.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._kv = KVCacheManager(
            config.num_blocks,
            config.block_size,
            config.group_windows,
            config.enable_prefix_caching,
            config.max_num_batched_tokens,
            make_eviction_policy(config.kv_eviction_policy, config.seed),
        )
        self._kv_capacity_tokens = config.kv_capacity_tokens
        self._requests: dict[int, Request] = {}  # waiting, running, and finished with steps in flight
        self._waiting = WaitingQueue()
        self._running: dict[int, Request] = {}  # in order of admission; with priorities, of urgency at the last step
        self._predictor = LengthPredictor()
        self._in_flight: dict[int, SchedulerOutput] = {}  # by step id, in order
        self._forgotten_request_ids: list[int] = []  # the runner has yet to be told
        self._num_steps = 0
        self._num_received = 0
        self._num_finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_queried_tokens = 0
        self._num_cached_tokens = 0
        self._num_generation_tokens = 0
        self._num_generation_tokens_shown = 0
        self._num_predicted_tokens = 0
        self._num_actual_tokens = 0
        self._num_mispredicted_tokens = 0

    # ---- requests in and out

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def add_request(self, request: Request, is_ready: bool = True) -> None:
        """Queue a request that `RequestLimits` let pass. Until it is ready those behind it go first."""
        assert request.request_id not in self._requests
        assert request.most_computed_tokens <= self._kv_capacity_tokens
        self._num_received += 1
        level = request.priority * AGEING_STEPS + self._num_steps if self.config.scheduling_policy == "priority" else 0
        request.urgency = (level, self._num_received)
        request.is_ready = is_ready
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def make_ready(self, request_id: int) -> None:
        """Let a request that waited be scheduled; one that is finished is ignored."""
        self._waiting.make_ready(request_id)

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
            self._num_generation_tokens -= request.truncate(num_tokens)
            self._finish(request, reason)

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work and count it as computed. Without work `request_ids` is empty and the output is
        not to be submitted; otherwise it must come back through `update` or `fail_step`."""
        step = SchedulerOutput(self._num_steps, [], [], [], [], [])
        held_back = self._make_way() if self.config.scheduling_policy == "priority" else frozenset()
        token_budget = self._schedule_running(step, held_back)
        self._admit_waiting(step, token_budget)
        if step.request_ids:
            self._num_steps += 1
            self._in_flight[step.step_id] = step
            step.finished_request_ids.extend(self._forgotten_request_ids)
            self._forgotten_request_ids.clear()
        return step

    def update(self, scheduler_output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestDelta]:
        """Accept what a step sampled; steps return in order. Results of requests that finished meanwhile are dropped.

        A request in `result.failed` fails alone, and its blocks are not shared any further. One that shares them
        already goes on: a NaN in keys or values it reads shows in its own logits.
        """
        assert next(iter(self._in_flight)) == scheduler_output.step_id
        deltas = []
        prompt_logprobs = dict(result.prompt_logprobs)
        for request_id, message in result.failed.items():
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
        return deltas

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> list[RequestDelta]:
        """End a step that raised, with every request that depends on it: those in it, and those in later steps that
        share a block which the failed ones have written since. The blocks they wrote lose their hashes.

        Such a sharer is failed, not reset: it was admitted after this step, so it has a step in flight itself.
        """
        failed: dict[int, None] = {}
        bad_block_ids: set[int] = set()
        first = self._in_flight[scheduler_output.step_id]
        for step in self._in_flight.values():
            if step.step_id < first.step_id:
                continue
            # In batch order: a request shares blocks only of those before it.
            for request_id, start in zip(step.request_ids, step.num_computed_tokens, strict=True):
                if step is first or not bad_block_ids.isdisjoint(self._kv.block_ids(request_id)):
                    failed[request_id] = None
                    bad_block_ids |= self._kv.block_ids(request_id, start)
        self._kv.forget_hashes(bad_block_ids)
        self._forgotten_request_ids += scheduler_output.finished_request_ids  # perhaps not read
        deltas = [delta for request_id in failed for delta in self._fail(self._requests[request_id], message)]
        self._retire(scheduler_output)
        return deltas

    # ---- scheduling

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

    def _schedule_running(self, step: SchedulerOutput, held_back: Set[int]) -> int:
        """Give the running requests their tokens, in order, but for those held back. Returns the budget left for
        admission: none when blocks were short.

        Every decode has its token, whatever a chunk before it could take. A chunk that does not end its prompt leaves
        no budget to admit others.
        """
        token_budget = self.config.max_num_batched_tokens
        running = [request for request in self._running.values() if request.request_id not in held_back]
        for num_behind, request in zip(range(len(running) - 1, -1, -1), running, strict=True):
            num_new_tokens = min(request.gap, token_budget, max(token_budget - num_behind, 1))
            if not num_new_tokens or request.request_id not in self._running:
                continue
            new_block_ids = self._allocate_or_preempt(request, num_new_tokens)
            if new_block_ids is None:
                return 0  # those after it stay idle, so that they can be preempted
            self._add(step, request, num_new_tokens, new_block_ids)
            token_budget -= num_new_tokens
        return token_budget

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
        """Free, forget, requeue: its tokens are kept, and computed anew when it is next."""
        self._kv.free(request)
        request.num_computed_tokens = 0
        del self._running[request.request_id]
        self._waiting.add(request)
        self._num_preemptions += 1

    def _admit_waiting(self, step: SchedulerOutput, token_budget: int) -> None:
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
            self._announce(step, request)
            num_new_tokens = min(request.gap, token_budget)
            allocated = self._kv.allocate(request, num_new_tokens)
            assert allocated is not None
            self._add(step, request, num_new_tokens, self._kv.tables(request))
            token_budget -= num_new_tokens

    def _will_fit(self, request: Request, prefix: BlockTables) -> bool:
        """Whether the pool will probably hold the request and those that run until they have ended, so that none is
        preempted, apart from those that this one may preempt. What is alone always fits."""
        running, block_size = self._running.values(), self.config.block_size
        if not running or not self.config.group_windows:
            return True
        loads = [self._load(request, self._kv.num_used(prefix) // len(self.config.group_windows) * block_size)]
        loads += (self._load(other, other.num_cached_tokens) for other in running if not self._yields(other, request))
        num_own = sum(self._num_slots(other.num_computed_tokens - other.num_cached_tokens) for other in running)
        num_shared = max(self._kv.pool.num_used * block_size - num_own, 0)
        return num_shared + predicted_peak(loads) <= self.config.num_blocks * block_size

    def _load(self, request: Request, num_shared_tokens: int) -> tuple[int, int, int]:
        """Slots of its own that the request holds when its gap is closed, how many tokens it will probably add, and the
        slots that each of them takes."""
        num_tokens, windows = request.num_tokens, self.config.group_windows
        num_output_tokens = num_tokens - request.num_prompt_tokens
        num_more = self._predictor.predict(num_output_tokens, request.max_tokens) - num_output_tokens
        num_own = self._num_slots(
            num_tokens - num_shared_tokens + self.config.block_size // 2
        )  # half of the last block
        num_per_token = sum(not window or num_tokens < window for window in windows)
        return num_own, max(num_more - 1, 0), num_per_token

    def _num_slots(self, num_tokens: int) -> int:
        """Slots that so many tokens take in all groups, each of which keeps those in its window."""
        num_tokens = max(num_tokens, 0)
        return sum(min(num_tokens, window or num_tokens) for window in self.config.group_windows)

    def _announce(self, step: SchedulerOutput, request: Request) -> None:
        """Tell the runner of a request that starts, or starts anew."""
        if request.was_scheduled:
            step.reset_request_ids.append(request.request_id)
            return
        request.was_scheduled = True
        request.predicted_tokens = self._predictor.predict(0, request.max_tokens)
        request.num_cached_tokens = request.num_computed_tokens
        self._num_prompt_tokens += request.num_prompt_tokens
        if self.config.enable_prefix_caching and not request.skips_prefix_cache:
            self._num_queried_tokens += request.num_prompt_tokens
        self._num_cached_tokens += request.num_cached_tokens
        step.new_requests.append(
            NewRequest(
                request.request_id,
                request.prompt_token_ids,
                request.sampling_params,
                request.seed,
                request.choice,
                tuple(sorted(request.stop_token_ids)),
            )
        )

    def _add(self, step: SchedulerOutput, request: Request, num_new_tokens: int, new_block_ids: BlockTables) -> None:
        """Put a request into the step and advance its ledger."""
        step.request_ids.append(request.request_id)
        step.num_computed_tokens.append(request.num_computed_tokens)
        step.num_scheduled_tokens.append(num_new_tokens)
        step.new_block_ids.append(new_block_ids)
        request.num_computed_tokens += num_new_tokens
        samples = request.num_computed_tokens == request.num_tokens
        step.samples.append(samples)
        request.num_placeholders += samples
        request.num_steps_in_flight += 1
        self._kv.register_full_blocks(request)

    # ---- results

    def _accept(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> RequestDelta:
        request.num_placeholders -= 1
        reason: FinishReason | None = None if request.max_tokens else "length"
        num_accepted = 0
        while num_accepted < len(token_ids) and reason is None:
            reason = request.append(token_ids[num_accepted])
            num_accepted += 1
        self._num_generation_tokens += num_accepted
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
        if self._running.pop(request.request_id, None) is None:
            self._waiting.remove(request.request_id)
        self._num_finished[reason] += 1
        if request.max_tokens and request.was_scheduled and reason != "error":
            self._learn(request, reason)
        if not request.num_steps_in_flight:
            self._release(request)

    def _learn(self, request: Request, reason: FinishReason) -> None:
        num_tokens, num_predicted = request.num_output_tokens, request.predicted_tokens
        self._predictor.observe(num_tokens, is_cut_off=reason != "stop")
        if reason != "abort":
            self._num_predicted_tokens += num_predicted
            self._num_actual_tokens += num_tokens
            self._num_mispredicted_tokens += abs(num_predicted - num_tokens)

    def _retire(self, step: SchedulerOutput) -> None:
        """A step has returned: what only waited for it can go."""
        del self._in_flight[step.step_id]
        for index, request_id in enumerate(step.request_ids):
            request = self._requests[request_id]
            request.num_steps_in_flight -= 1
            if request.finish_reason is None:
                self._kv.free_unseen(request, step.num_computed_tokens[index] + step.num_scheduled_tokens[index])
            elif not request.num_steps_in_flight:
                self._release(request)

    def _release(self, request: Request) -> None:
        self._kv.free(request)
        del self._requests[request.request_id]
        if request.was_scheduled:
            self._forgotten_request_ids.append(request.request_id)

    # ---- looking in

    def stats(self) -> SchedulerStats:
        # A reader of the output may take tokens back after they were counted; a counter may pause, not fall.
        self._num_generation_tokens_shown = max(self._num_generation_tokens_shown, self._num_generation_tokens)
        return SchedulerStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_used_blocks=self._kv.pool.num_used,
            num_blocks=self.config.num_blocks,
            num_received=self._num_received,
            num_finished=dict(self._num_finished),
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._num_queried_tokens,
            prefix_cache_hits=self._num_cached_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens_shown,
            num_evicted_blocks=self._kv.pool.num_evicted,
            num_predicted_tokens=self._num_predicted_tokens,
            num_actual_tokens=self._num_actual_tokens,
            num_mispredicted_tokens=self._num_mispredicted_tokens,
        )

    def check(self) -> None:
        """Assert the invariants of DESIGN.md section 5."""
        self._kv.check(self._requests)
        num_in_flight = Counter(chain.from_iterable(step.request_ids for step in self._in_flight.values()))
        assert num_in_flight.keys() <= self._requests.keys()
        for request_id, request in self._requests.items():
            is_finished = request.finish_reason is not None
            assert (request_id in self._waiting) + (request_id in self._running) + is_finished == 1
            assert request.num_steps_in_flight == num_in_flight[request_id] >= is_finished
            if not is_finished:
                request.check()
        self._waiting.check()
        assert len(self._running) <= self.config.max_num_seqs
        assert self._num_received == len(self._waiting) + len(self._running) + sum(self._num_finished.values())
        for step in self._in_flight.values():
            assert 0 < len(step.request_ids) == len(set(step.request_ids)) <= self.config.max_num_seqs
            assert 0 < step.num_tokens <= self.config.max_num_batched_tokens

"""Scheduler: which tokens of which requests the next step computes, and what became of those that were computed.

One ledger, no phases: prefill, chunks, decode, drafts, prefix hits and resuming are sizes of a request's gap. Knows
nothing of text, time, devices or processes.
"""

from collections.abc import Collection, Sequence

from msgspec import structs

from octavo.core.beam_search import BeamSearch, Hypothesis
from octavo.core.beams import Beams
from octavo.core.block_pool import hash_block
from octavo.core.choices import Choices
from octavo.core.eviction import make_eviction_policy
from octavo.core.forecast import Forecast
from octavo.core.in_flight import InFlight
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.preemption import Preemption
from octavo.core.prefix_index import HashBlock
from octavo.core.request import Request
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.scheduler_stats import SchedulerStats
from octavo.core.step import (
    FinishReason,
    ModelRunnerOutput,
    RequestDelta,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.core.step_builder import StepBuilder
from octavo.core.step_packer import StepPacker
from octavo.core.swap_cost import SwapCost
from octavo.core.totals import Totals
from octavo.core.waiting_queue import WaitingQueue
from octavo.errors import TierFailedError

__all__ = ["Scheduler"]

AGEING_STEPS = 256
"""A request that has waited for this many steps more is as urgent as one of the next lower priority value."""


class Scheduler:
    """The requests of one engine, first come, first served, or by priority.

    By priority the order is that of priority · AGEING_STEPS + the step of arrival: every request ages at the same rate,
    so the order between two of them never changes, and one waits for later ones of priority p, in steps, no longer than
    (its priority - p) · AGEING_STEPS.

    Invariants: a request that is not finished is in exactly one of waiting and running; no more run than a step has
    tokens; one with a step in flight keeps its blocks, finished or not, until its last step returns; the first running
    request can always proceed once the steps in flight have returned, since it may preempt every other one and fits
    alone. What the parts own, they state and check.
    """

    def __init__(self, config: SchedulerConfig, hash_block: HashBlock = hash_block) -> None:
        assert config.keeps_back_unsampled or not config.sends_sampled_tokens
        self.config = config
        self._kv = KVCacheManager(
            config.kv_geometry,
            config.enable_prefix_caching,
            make_eviction_policy(config.kv_eviction_policy, config.seed),
            SwapCost(config.prefill_tokens_per_s, config.copy_bytes_per_s, config.block_bytes),
            hash_block,
        )
        self._requests: dict[int, Request] = {}  # waiting, running, and finished with steps in flight
        self._waiting = WaitingQueue(lambda r: not (self._choices.are_held(r) or self._beams.await_token(r)))
        self._running: dict[int, Request] = {}  # in order of admission; with priorities, of urgency at the last step
        self._in_flight = InFlight()
        self._builder = StepBuilder(config.sends_sampled_tokens)
        self._totals = Totals()
        self._forecast = Forecast(self._kv)
        self._choices = Choices()
        preemption = Preemption(config, self._kv, self._waiting, self._running, self._totals)
        self._beams = Beams(self._kv, self._waiting, self._running, self._totals, self._forecast, preemption)
        self._packer = StepPacker(
            config,
            self._kv,
            self._waiting,
            self._running,
            self._in_flight,
            self._builder,
            self._totals,
            self._forecast,
            self._choices,
            self._beams,
            preemption,
        )

    # ---- requests in and out

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of one request that can be held now: a tier that failed counts no more."""
        geometry = self._kv.geometry
        return geometry.pool_tokens if self._kv.is_tier_closed else geometry.capacity_tokens

    @property
    def is_tier_closed(self) -> bool:
        """Whether the tier failed, so that nothing is swapped any more."""
        return self._kv.is_tier_closed

    def add_request(self, request: Request, is_ready: bool = True, leader: Request | None = None) -> None:
        """Queue a request that `RequestLimits` let pass. Until it is ready those behind it go first.

        With a `leader`, a request of the same prompt that was added since the last step, the prompt is computed once.
        """
        assert request.request_id not in self._requests
        assert request.most_computed_tokens <= self._kv.geometry.capacity_tokens
        self._totals.received += 1
        is_ordered = self.config.scheduling_policy == "priority"
        level = request.priority * AGEING_STEPS + self._builder.step_id if is_ordered else 0
        self._choices.add(request, is_ready, leader)
        self._requests[request.request_id] = request
        self._waiting.arrive(request, (level, self._totals.received))

    def open_beam_search(self, beams: Sequence[Request], search: BeamSearch, num_logprobs: int | None) -> None:
        """Let requests of one prompt, added since the last step with a `max_tokens` of 0, be the beams of a search."""
        self._beams.open(beams, search, num_logprobs)

    def make_ready(self, request_id: int) -> None:
        """Let a request that waited for its grammar be scheduled; one that is finished is ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.finish_reason is None:
            self._waiting.recheck(self._choices.make_ready(request))

    def set_drafts(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Guess the tokens after a request's known ones: its next step verifies them, as far as it has room for them.

        They are ignored where they could not be verified: of a request that is not generating, or has a step in flight
        that samples, or of a beam; and those beyond max_tokens are.
        """
        request = self._running.get(request_id)
        if request is None or not request.num_output_tokens or self._beams.num_candidates(request_id):
            return
        if request.num_placeholders or request.num_computed_tokens >= len(request.token_ids):
            return
        request.draft_token_ids = list(token_ids[: request.most_computed_tokens - len(request.token_ids)])

    def fail(self, request_id: int, message: str) -> list[RequestDelta]:
        """End a request that can't be computed; one that is finished is ignored."""
        request = self._requests.get(request_id)
        return self._fail(request, message) if request is not None else []

    def abort(self, request_id: int) -> None:
        """End a request in whatever state it is, and the others of its beam search; an unknown or finished one is
        ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.finish_reason is None:
            for ended in self._beams.close(request):
                self._finish(ended, "abort")

    def finish(self, request_id: int, reason: FinishReason, num_tokens: int) -> None:
        """End a request at `num_tokens` output tokens, where its reader found the end: later ones don't count.

        An unknown or finished request is ignored.
        """
        request = self._requests.get(request_id)
        if request is not None and request.finish_reason is None:
            self._totals.generation_tokens -= request.truncate(num_tokens)
            self._finish(request, reason)

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work and count it as computed. An empty output is not to be submitted; any other must
        come back through `update` or `fail_step`."""
        if not self._packer.pack():
            return SchedulerOutput(self._builder.step_id, [])
        step = self._builder.build(self._kv.begin_step(self._builder.step_id))
        self._in_flight.begin(step)
        self._totals.count_step(step.num_tokens)
        return step

    def update(self, scheduler_output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestDelta]:
        """Accept what a step sampled; steps return in order. Results of requests that finished meanwhile are dropped.

        A request in `result.failed` fails alone, and its blocks are not shared any further. One that shares them
        already goes on: a NaN in keys or values it reads shows in its own logits.
        """
        assert self._in_flight.is_oldest(scheduler_output)
        if scheduler_output.copies:
            self._settle_copies(scheduler_output, set(result.failed_copies), is_at_fault=True)
        if self._kv.residency is not None:
            self._kv.residency.observe(scheduler_output, result)
        deltas: list[RequestDelta] = []
        choices, beams = self._choices, self._beams
        prompt_logprobs = dict(result.prompt_logprobs)
        for request_id, rows in prompt_logprobs.items():
            choices.keep_prompt_logprobs(request_id, rows)
        if result.failed:
            for request_id, message in choices.with_forks(result.failed, result.request_ids).items():
                self._kv.index.forget_prefixes(self._requests[request_id])
                deltas += self._fail(self._requests[request_id], message)
        for request_id, token_ids, logprobs in zip(
            result.request_ids, result.sampled_token_ids, result.logprobs, strict=True
        ):
            request = self._requests[request_id]
            if request.finish_reason is None:
                if request.num_placeholders:
                    request.num_placeholders -= 1
                elif request.draft_token_ids:
                    self._kv.settle_drafts(request, len(token_ids))
                if beams and beams.take(request, logprobs):
                    continue
                rows_of_prompt = prompt_logprobs.pop(request_id, None) if prompt_logprobs else None
                if choices.has_forks:
                    rows_of_prompt = choices.accept_first(request, rows_of_prompt)
                deltas.append(self._accept(request, token_ids, logprobs, rows_of_prompt))
        for request_id, rows in prompt_logprobs.items():  # prompts that are not read to their end
            if self._requests[request_id].finish_reason is None:
                deltas.append(RequestDelta(request_id, [], prompt_logprobs=rows))
        for request_id, embedding in result.embeddings.items():
            request = self._requests[request_id]
            if request.finish_reason is None:
                request.num_placeholders = 0
                deltas.append(self._end(request, "stop", embedding=embedding))
        self._retire(scheduler_output)
        if self._kv.is_tier_closed:
            deltas += self._fail_unfitting()
        if beams:
            deltas += [self._end_beam(*ended) for ended in beams.advance()]
        return deltas

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> list[RequestDelta]:
        """End a step that raised, with every request that depends on it: those in it, and those in later steps that
        share a block which the failed ones have written since. The blocks they wrote lose their hashes.

        Such a sharer is failed, not reset: it was admitted after this step, so it has a step in flight itself. The
        step's copies count as not done.
        """
        failed, bad_block_ids = self._in_flight.dependents(scheduler_output, self._kv.tables.block_ids)
        self._settle_copies(scheduler_output, range(len(scheduler_output.copies)), is_at_fault=False)
        self._kv.index.forget(bad_block_ids)
        self._builder.forget_again(scheduler_output)
        deltas = [delta for request_id in failed for delta in self._fail(self._requests[request_id], message)]
        self._retire(scheduler_output)
        return deltas

    # ---- results

    def _settle_copies(self, step: SchedulerOutput, failed: Collection[int], is_at_fault: bool) -> None:
        for request_id, num_tokens in self._kv.settle(step.step_id, failed, is_at_fault).items():
            self._requests[request_id].num_computed_tokens = num_tokens

    def _accept(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> RequestDelta:
        reason: FinishReason | None = None if request.max_tokens else "length"
        num_accepted = 0
        while num_accepted < len(token_ids) and reason is None:
            reason = request.append(token_ids[num_accepted])
            num_accepted += 1
        self._totals.generation_tokens += num_accepted
        if reason is not None:
            self._finish(request, reason)
        elif len(request.token_ids) % self.config.block_size < num_accepted:  # a block may have become full
            self._kv.register_full_blocks(request)
        return RequestDelta(
            request.request_id,
            token_ids[:num_accepted],
            logprobs[:num_accepted] if logprobs else None,
            reason,
            request.stop_reason if reason == "stop" else None,
            self._builder.num_cached_tokens.get(request.request_id, 0),
            prompt_logprobs=prompt_logprobs,
        )

    def _end(
        self, request: Request, reason: FinishReason, error: str | None = None, embedding: bytes | None = None
    ) -> RequestDelta:
        num_cached_tokens = self._builder.num_cached_tokens.get(request.request_id, 0)
        self._finish(request, reason)
        return RequestDelta(
            request.request_id,
            [],
            finish_reason=reason,
            num_cached_tokens=num_cached_tokens,
            error=error,
            embedding=embedding,
        )

    def _end_beam(self, request: Request, hypothesis: Hypothesis, logprobs: list[TokenLogprobs] | None) -> RequestDelta:
        """End a beam, whatever it was, with this output."""
        token_ids, reason = hypothesis.beam.token_ids, hypothesis.finish_reason
        self._totals.generation_tokens += len(token_ids) - request.num_output_tokens
        request.token_ids[request.num_prompt_tokens :] = token_ids
        return structs.replace(
            self._end(request, reason),
            new_token_ids=token_ids,
            logprobs=logprobs,
            stop_reason=request.stop_reason if reason == "stop" else None,
            score=hypothesis.score,
        )

    def _fail(self, request: Request, message: str) -> list[RequestDelta]:
        """A beam that fails ends its search."""
        if request.finish_reason is not None:
            return []
        return [self._end(ended, "error", error=message) for ended in self._beams.close(request)]

    def _fail_unfitting(self) -> list[RequestDelta]:
        """Fail requests that are longer than the pool, when the tier has failed that was to hold their rest."""
        going_on = [request for request in self._requests.values() if request.finish_reason is None]
        deltas = []
        for request in filter(self._kv.geometry.is_long, going_on):
            deltas += self._fail(request, str(TierFailedError(request.num_tokens, self.kv_capacity_tokens)))
        return deltas

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        may_be_ready = self._choices.leave(request)
        if self._running.pop(request.request_id, None) is None:
            self._waiting.remove(request.request_id)
        self._waiting.leave(request.request_id)
        if may_be_ready is not None:
            self._waiting.recheck(may_be_ready)
        self._totals.finished[reason] += 1
        self._forecast.end(request, reason)
        if not request.num_steps_in_flight:
            self._release(request)

    def _retire(self, step: SchedulerOutput) -> None:
        """A step has returned: what only waited for it can go."""
        for request_id in self._in_flight.retire(step):
            request = self._requests[request_id]
            request.num_steps_in_flight -= 1
            if request.finish_reason is not None and not request.num_steps_in_flight:
                self._release(request)
        has_windows = self._kv.geometry.has_windows
        for entry in step.entries:
            request = self._requests[entry.request_id]
            request.num_steps_in_flight -= 1
            if request.finish_reason is not None:
                if not request.num_steps_in_flight:
                    self._release(request)
            elif has_windows:
                end = entry.first_position + entry.num_tokens
                self._kv.free_unseen(request, min(end, request.num_computed_tokens))

    def _release(self, request: Request) -> None:
        self._kv.release(request)
        self._builder.forget(request.request_id)
        del self._requests[request.request_id]

    # ---- looking in

    def stats(self) -> SchedulerStats:
        return self._totals.stats(
            self.config, self._kv, self._forecast, len(self._waiting), len(self._running), self._choices.num_unready
        )

    def check(self) -> None:
        """Assert the invariants, of all parts too."""
        config, requests = self.config, self._requests
        for request_id, request in requests.items():
            is_finished = request.finish_reason is not None
            assert (request_id in self._waiting) + (request_id in self._running) + is_finished == 1
            if not is_finished:
                request.check()
        assert len(self._running) <= min(config.max_num_seqs, config.max_num_batched_tokens)
        assert self._totals.received == len(self._waiting) + len(self._running) + sum(self._totals.finished.values())
        self._kv.check(requests)
        self._waiting.check()
        self._in_flight.check(requests.values(), config.max_num_seqs, config.max_num_batched_tokens)
        self._builder.check(requests)
        self._choices.check(requests)
        self._beams.check(requests)
        self._forecast.check(requests)

"""LLMEngine: requests in, steps over, deltas out. The same class serves `LLM` in place and the server's engine process.

Knows token ids only: no text, no HTTP, no clock.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from msgspec import Struct, structs

from octavo.core.request import Request, RequestLimits
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_stats import SchedulerStats
from octavo.core.step import (
    NO_MASKS,
    Executor,
    Fault,
    ModelRunnerOutput,
    RequestDelta,
    SchedulerOutput,
    StepHandle,
    TokenMasks,
)
from octavo.engine.grammars import Grammars
from octavo.engine.memory_roof import MemoryRoof
from octavo.engine.request_maker import RequestMaker
from octavo.errors import InvalidRequestError
from octavo.ipc.messages import AddPooling, AddRequest

__all__ = ["LLMEngine"]

GRAMMAR_WAIT_S = 0.002
"""A new request waits no longer than this while all others wait for their grammars."""


def _no_compiler() -> NoReturn:
    raise InvalidRequestError("This engine has no structured output.", param="structured_outputs")


class _Flight(Struct, frozen=True):
    """A step in flight."""

    step: SchedulerOutput
    handle: StepHandle
    constrained: list[int]
    """The requests for which it samples under masks."""


class LLMEngine:
    """Schedules requests and runs their steps.

    Invariant: `_in_flight` holds the submitted steps, oldest first, at most `max_steps_in_flight` of them; the executor
    returns them in that order. `progress` gives a number that changes while a step computes, to any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        limits: RequestLimits,
        eos_token_ids: frozenset[int],
        max_steps_in_flight: int = 1,
        seed: int = 0,
        is_pooling: bool = False,
        progress: Callable[[], int] = int,
        grammars: Grammars | None = None,
        roof: MemoryRoof | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.limits = limits
        self._maker = RequestMaker(eos_token_ids, seed)
        self.max_steps_in_flight = max_steps_in_flight
        self.is_pooling = is_pooling
        self.progress = progress
        self.grammars = grammars or Grammars(_no_compiler)
        self.roof = roof
        self._started: list[int] = []
        self._in_flight: deque[_Flight] = deque()

    def add_request(self, request: AddRequest) -> None:
        """Queue a request's completions. Raises InvalidRequestError for one that can never be served."""
        if self.is_pooling:
            raise InvalidRequestError("This engine embeds texts (--runner pooling); it does not generate.")
        params = request.sampling_params
        assert params is not None, "the loop fills in what was sent once for several"
        limits = self._limits_now()
        limits.check(request.prompt_token_ids, params)
        structure = params.structured_outputs
        max_tokens = limits.max_tokens(len(request.prompt_token_ids), params)
        search = None
        if params.beam_search is not None:
            search = self._maker.beam_search(params, max_tokens, self.limits.vocab_size)
            max_tokens = 0
        completions: list[Request] = []
        for choice in range(params.n):
            completion = self._maker.completion(request, params, choice, max_tokens)
            is_ready = structure is None or self.grammars.open(completion.request_id, structure)
            self.scheduler.add_request(completion, is_ready, completions[0] if completions else None)
            completions.append(completion)
        if search is not None:
            self.scheduler.open_beam_search(completions, search, params.logprobs)

    def _limits_now(self) -> RequestLimits:
        """Without the tier, if that has failed."""
        if not self.scheduler.is_tier_closed:
            return self.limits
        return replace(self.limits, kv_capacity_tokens=self.scheduler.kv_capacity_tokens)

    def add_pooling(self, request: AddPooling) -> None:
        """Queue a text to embed. Raises InvalidRequestError for one that can never be served."""
        if not self.is_pooling:
            raise InvalidRequestError("This engine generates text; it embeds when started with --runner pooling.")
        self.limits.check_input(request.prompt_token_ids)
        self.scheduler.add_request(self._maker.pooled(request))

    def abort(self, request_id: int) -> None:
        """End a request, whatever its state, and the others of its beam search. One that is unknown or finished is
        ignored."""
        self.scheduler.abort(request_id)
        self.grammars.close(request_id)

    def finish(self, request_id: int, num_tokens: int) -> None:
        """A stop string ended the request at its `num_tokens`-th generated token."""
        self.scheduler.finish(request_id, "stop", num_tokens)
        self.grammars.close(request_id)

    def step(self) -> list[RequestDelta]:
        """Submit steps until as many are in flight as allowed, then return the oldest one's deltas, and those of
        requests that never came so far. While all requests wait for their grammars it sleeps, for a little."""
        refusals = self._take_built_grammars() if self.grammars.are_built else []
        while len(self._in_flight) < self.max_steps_in_flight and self.submit() is not None:
            pass
        if self._in_flight:
            return refusals + self.collect()
        if not refusals and self.scheduler.has_unfinished_requests:
            self.grammars.wait_built(GRAMMAR_WAIT_S)
        return refusals

    def submit(self) -> SchedulerOutput | None:
        """Schedule and submit one step; None where there is nothing to do now."""
        step = self.scheduler.schedule()
        if step.is_empty:
            return None
        if step.new_requests:
            self._started += (new.request_id for new in step.new_requests)
        constrained = self._constrained(step) if self.grammars.are_wanted else []
        if constrained and step.given_tokens:
            self._foresee_masks(step, constrained)
        self._in_flight.append(_Flight(step, self.executor.submit(step), constrained))
        return step

    def _take_built_grammars(self) -> list[RequestDelta]:
        """Requests whose grammar is compiled may be scheduled; those whose grammar can't be are over."""
        deltas: list[RequestDelta] = []
        for request_id, error in self.grammars.take_built():
            if error is None:
                self.scheduler.make_ready(request_id)
                continue
            fault = Fault("structured_outputs") if isinstance(error, InvalidRequestError) else None
            deltas += (structs.replace(d, fault=fault) for d in self.scheduler.fail(request_id, str(error)))
        return self._closed(deltas)

    def _constrained(self, step: SchedulerOutput) -> list[int]:
        return self.grammars.constrained(entry.request_id for entry in step.entries if entry.num_logits)

    def collect(self) -> list[RequestDelta]:
        """Wait for the oldest step in flight."""
        flight = self._in_flight.popleft()
        deltas: list[RequestDelta] = []
        masks: TokenMasks = NO_MASKS
        if flight.constrained:
            masks, errors = self.grammars.masks(flight.constrained)
            for request_id, message in errors.items():
                deltas += self.scheduler.fail(request_id, message)
        try:
            result = flight.handle.result(masks)
        except Exception as error:
            return self._closed(deltas + self.scheduler.fail_step(flight.step, f"{type(error).__name__}: {error}"))
        if flight.constrained:
            self._advance_grammars(flight.constrained, result)
        if self.roof is not None:
            self.roof.observe(flight.step, result.compute_s)
        updates = self.scheduler.update(flight.step, result)
        if result.unsatisfiable:
            messages = {
                result.failed[request_id] for request_id in result.unsatisfiable
            }  # a prompt's choices fail alike
            updates = [structs.replace(d, fault=Fault()) if d.error in messages else d for d in updates]
        return self._closed(deltas + updates)

    def _foresee_masks(self, step: SchedulerOutput, constrained: list[int]) -> None:
        """Those of requests whose drafts the step verifies: the last of the tokens that it gives."""
        given = {tokens.request_id: tokens.token_ids for tokens in step.given_tokens}
        verified = {entry.request_id: entry.num_logits - 1 for entry in step.entries if entry.num_logits > 1}
        self.grammars.foresee({i: given[i][-verified[i] :] for i in constrained if i in verified})

    def _advance_grammars(self, constrained: list[int], result: ModelRunnerOutput) -> None:
        accepted = dict(zip(result.request_ids, result.sampled_token_ids, strict=True))
        self.grammars.accept({request_id: accepted[request_id] for request_id in constrained if request_id in accepted})

    def _closed(self, deltas: list[RequestDelta]) -> list[RequestDelta]:
        """Drop the grammars of requests that are over."""
        for i, delta in enumerate(deltas):
            if delta.finish_reason is not None and self.grammars.close(delta.request_id) is not None:
                deltas[i] = structs.replace(delta, fault=Fault("structured_outputs"))
        return deltas

    def take_started(self) -> list[int]:
        """Requests that were scheduled for the first time since the last call."""
        started, self._started = self._started, []
        return started

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests or bool(self._in_flight)

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    @property
    def memory_roof_share(self) -> float | None:
        """How near the latest decode steps came to what memory allows, where that is known."""
        return None if self.roof is None else self.roof.share

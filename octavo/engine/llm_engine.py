"""LLMEngine: requests in, steps over, deltas out. The same class serves `LLM` in place and the server's engine process.

Knows token ids only: no text, no HTTP, no clock.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from msgspec import Struct, structs

from octavo.core.beam_search import MAX_CANDIDATES, BeamSearch
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
from octavo.errors import InvalidRequestError
from octavo.ipc.messages import AddPooling, AddRequest
from octavo.sampling_params import SamplingParams

__all__ = ["LLMEngine"]

POOLED = SamplingParams(max_tokens=0, temperature=0.0)
"""Of requests that sample nothing."""
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
        self.eos_token_ids = eos_token_ids
        self.max_steps_in_flight = max_steps_in_flight
        self.seed = seed
        self.is_pooling = is_pooling
        self.progress = progress
        self.grammars = grammars or Grammars(_no_compiler)
        self.roof = roof
        self._started: list[int] = []
        self._latest: tuple[SamplingParams, frozenset[int]] | None = None
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
        request_ids = range(request.request_id, request.request_id + params.n)
        search = None
        if params.beam_search is not None:
            search = self._beam_search(params, max_tokens)
            max_tokens = 0
        completions: list[Request] = []
        for choice, request_id in enumerate(request_ids):
            is_ready = structure is None or self.grammars.open(request_id, structure)
            completion = Request(
                request_id,
                request.prompt_token_ids,
                params,
                max_tokens=max_tokens,
                eos_token_ids=self.eos_token_ids,
                stop_token_ids=self._stop_token_ids(params),
                seed=self._draw_seed(request_id) if params.seed is None else params.seed,
                choice=choice,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            self.scheduler.add_request(completion, is_ready, completions[0] if completions else None)
            completions.append(completion)
        if search is not None:
            self.scheduler.open_beam_search(completions, search, params.logprobs)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """One set for all that were sent together: there may be thousands of these and of ids."""
        if self._latest is None or self._latest[0] is not params:
            takes_eos = not params.ignore_eos or params.structured_outputs is not None
            own = frozenset(params.stop_token_ids)
            self._latest = params, own | self.eos_token_ids if takes_eos else own
        return self._latest[1]

    def _beam_search(self, params: SamplingParams, max_tokens: int) -> BeamSearch:
        assert params.beam_search is not None
        end_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        search = BeamSearch(params.n, params.beam_search, max_tokens, end_token_ids)
        if search.num_candidates > self.limits.vocab_size:
            raise InvalidRequestError(
                f"n must be smaller for beam search, got {params.n}: it looks at {search.num_candidates} tokens at a "
                f"time, and the model has {self.limits.vocab_size}.",
                param="n",
            )
        num_candidates = params.n * search.num_candidates
        if num_candidates > MAX_CANDIDATES:
            raise InvalidRequestError(
                f"Beam search with n = {params.n} and {len(end_token_ids)} tokens to stop at looks at {num_candidates} "
                f"continuations a step; one request may have {MAX_CANDIDATES}. Name fewer stop tokens, or lower n.",
                param="stop_token_ids",
            )
        return search

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
        self.scheduler.add_request(
            Request(
                request.request_id,
                request.prompt_token_ids,
                POOLED,
                max_tokens=0,
                eos_token_ids=frozenset(),
                stop_token_ids=frozenset(),
                seed=0,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
        )

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

    def _draw_seed(self, request_id: int) -> int:
        """A seed for a request without one: differs between requests, repeats from run to run."""
        digest = hashlib.sha256(f"{self.seed}:{request_id}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

"""Drives a scheduler over the fake device, through the engine, and checks every invariant after every call.

Where the scheduler sends sampled tokens, a rank that does not sample rebuilds the input of every step.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

from octavo.core.beam_search import BeamSearch
from octavo.core.request import Request, RequestLimits
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import RequestDelta, SchedulerOutput
from octavo.engine.llm_engine import LLMEngine
from octavo.sampling_params import SamplingParams
from tests.core.fake_executor import VOCAB_SIZE, FakeExecutor, naive_output
from tests.core.two_ranks import FirstRank


class SchedulerDriver:
    """`submit` and `collect` are the two halves of an engine's step; `run` does both over and over."""

    MOST_IDLE_STEPS = 400
    """Steps in a row without a running request that has something to compute: blocks may be short for as long as those
    before it run."""

    def __init__(
        self,
        *,
        num_steps_in_flight: int = 1,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        num_blocks: int = 64,
        block_size: int = 4,
        enable_prefix_caching: bool = True,
        scheduling_policy: str = "fcfs",
        admission_policy: str = "greedy",
        windows: tuple[int, ...] = (0,),
        num_swap_blocks: int = 0,
        **options: Any,
    ) -> None:
        self.num_steps_in_flight = num_steps_in_flight
        self.windows = windows
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                num_blocks=num_blocks,
                block_size=block_size,
                enable_prefix_caching=enable_prefix_caching,
                scheduling_policy=scheduling_policy,
                admission_policy=admission_policy,
                num_swap_blocks=num_swap_blocks,
                block_bytes=1,
                **({"copy_bytes_per_s": 100.0} | options),
                group_windows=windows,
            )
        )
        self.executor = FakeExecutor(num_blocks, block_size, windows, num_swap_blocks)
        limits = RequestLimits(VOCAB_SIZE, 1 << 20, self.scheduler.kv_capacity_tokens)
        self.engine = LLMEngine(self.scheduler, self.executor, limits, frozenset(), num_steps_in_flight)
        self.in_flight: list[SchedulerOutput] = []
        self.requests: dict[int, Request] = {}
        self.first_rank = FirstRank() if self.scheduler.config.sends_sampled_tokens else None
        self._num_idle_steps: dict[int, int] = {}
        self.deltas: list[RequestDelta] = []
        self._ids = count()

    def add(
        self,
        prompt_token_ids: list[int],
        max_tokens: int = 8,
        *,
        seed: int = 0,
        choice: int = 0,
        stop: tuple[int, ...] = (),
        eos: tuple[int, ...] = (),
        cache_salt: str | None = None,
        ignore_eos: bool = False,
        min_tokens: int = 0,
        priority: int = 0,
        leader: Request | None = None,
        is_ready: bool = True,
    ) -> Request:
        params = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=stop, ignore_eos=ignore_eos, min_tokens=min_tokens
        )
        request = Request(
            next(self._ids),
            prompt_token_ids,
            params,
            max_tokens,
            frozenset(stop + eos),
            frozenset(eos),
            seed,
            choice=choice,
            cache_salt=cache_salt,
            priority=priority,
        )
        self.requests[request.request_id] = request
        self.scheduler.add_request(request, is_ready, leader)
        self.scheduler.check()
        return request

    def search(self, prompt_token_ids: list[int], params: SamplingParams, eos: frozenset[int]) -> list[Request]:
        """Add a beam search."""
        assert params.beam_search is not None
        assert params.max_tokens is not None
        beams: list[Request] = []
        for _ in range(params.n):
            beam = Request(next(self._ids), prompt_token_ids, params, 0, frozenset(), eos, 0)
            self.scheduler.add_request(beam, leader=beams[0] if beams else None)
            beams.append(beam)
        self.scheduler.open_beam_search(beams, BeamSearch(params.n, params.beam_search, params.max_tokens, eos), None)
        self.requests |= {beam.request_id: beam for beam in beams}
        self.scheduler.check()
        return beams

    def draft(self, request: Request, num_good: int, num_bad: int) -> None:
        """Set drafts of which the first `num_good` are what the request is going to sample."""
        rest = self.alone(request)[request.num_output_tokens :]
        drafts = rest[:num_good] + [(token_id + 1) % VOCAB_SIZE for token_id in rest[num_good : num_good + num_bad]]
        self.scheduler.set_drafts(request.request_id, drafts)
        self.scheduler.check()

    def submit(self) -> SchedulerOutput | None:
        """Schedule and submit one step; None when there is no work."""
        step = self.engine.submit()
        self.scheduler.check()
        if step is not None:
            self.in_flight.append(step)
            self._check_progress(step)
        return step

    def _check_progress(self, step: SchedulerOutput) -> None:
        """Every running request comes on: none waits for ever in the midst of the others."""
        for request_id, request in self.requests.items():
            waits = request_id in self.scheduler._running and request.gap and not request.num_steps_in_flight
            self._num_idle_steps[request_id] = self._num_idle_steps.get(request_id, 0) + 1 if waits else 0
            assert self._num_idle_steps[request_id] < self.MOST_IDLE_STEPS

    def collect(self) -> list[RequestDelta]:
        """Wait for the oldest step."""
        step = self.in_flight.pop(0)
        deltas = self.engine.collect()
        self.scheduler.check()
        if self.first_rank is not None:
            assert self.first_rank.input_ids(step) == self.executor.inputs[-1]
        self.deltas += deltas
        return deltas

    def step(self) -> bool:
        """Fill the pipeline, then collect its oldest step. False when nothing is left to do."""
        while len(self.in_flight) < self.num_steps_in_flight and self.submit() is not None:
            pass
        if self.in_flight:
            self.collect()
        return bool(self.in_flight) or self.scheduler.has_unfinished_requests

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until nothing is left to do, or `until` holds."""
        for _ in range(2_000):
            if until() or not self.step():
                return
        raise AssertionError("no end in sight")

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request.request_id)
        self.scheduler.check()

    def finish(self, request: Request, num_tokens: int) -> None:
        self.scheduler.finish(request.request_id, "stop", num_tokens)
        self.scheduler.check()

    def was_scheduled(self, request: Request) -> bool:
        """Whether the request has been in a step."""
        return any(request.request_id in step.request_ids for step in self.executor.steps)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens that the request found in the cache when it was scheduled first."""
        entries = (entry for step in self.executor.steps for entry in step.entries)
        return next(entry.first_position for entry in entries if entry.request_id == request.request_id)

    def returned(self, request: Request) -> list[int]:
        """The tokens in the request's deltas."""
        return [
            token_id
            for delta in self.deltas
            if delta.request_id == request.request_id
            for token_id in delta.new_token_ids
        ]

    def alone(self, request: Request) -> list[int]:
        """The output that the request has when it runs alone."""
        return naive_output(request, self.windows)

    def check_all_exact(self) -> None:
        """Assert that every request ended, with the output it has alone."""
        for request in self.requests.values():
            assert request.finish_reason in ("stop", "length")
            assert self.returned(request) == request.output_token_ids == self.alone(request)

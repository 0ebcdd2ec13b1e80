"""Whatever arrives, leaves, fails, is guessed or runs out of blocks, in whatever order: each request's output is the
one it has alone, as far as it got, and every invariant holds after every call, at one, two and four steps in flight.
A rank that does not sample rebuilds every step's input tokens from the steps alone, where they are made for it."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.core.request import Request
from octavo.sampling_params import BeamSearchOptions, SamplingParams
from tests.core.fake_executor import VOCAB_SIZE, naive_beams
from tests.core.scheduler_driver import SchedulerDriver

PREFIXES = [[(start + 11 * position) % VOCAB_SIZE for position in range(24)] for start in range(3)]
EOS = frozenset({3})
tokens = st.integers(0, VOCAB_SIZE - 1)


class SchedulerMachine(RuleBasedStateMachine):
    """An engine's main loop with its rules taken in any order."""

    num_steps_in_flight = 1
    driver: SchedulerDriver

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        scheduling_policy=st.sampled_from(["fcfs", "priority"]),
        admission_policy=st.sampled_from(["greedy", "predicted"]),
        kv_eviction_policy=st.sampled_from(["lru", "fifo", "random"]),
        windows=st.sampled_from([(0,), (0,), (5,), (3, 0), (4, 4, 0), (2, 2, 9)]),
        num_swap_blocks=st.sampled_from([0, 0, 3, 12, 40]),
        preemption_mode=st.sampled_from(["auto", "recompute", "swap"]),
        receivers=st.sampled_from(["all sample", "all sample", "stages", "one samples"]),
    )
    def start(self, receivers: str, **options: Any) -> None:
        self.driver = SchedulerDriver(
            num_steps_in_flight=self.num_steps_in_flight,
            keeps_back_unsampled=receivers != "all sample",
            sends_sampled_tokens=receivers == "one samples",
            **options,
        )
        self.num_shown = 0
        self.unready: list[Request] = []
        self.searches: dict[int, SamplingParams] = {}

    @rule(
        prefix=st.sampled_from(PREFIXES),
        num_common=st.integers(0, 24),
        rest=st.lists(tokens, min_size=1, max_size=6),
        max_tokens=st.integers(0, 20),
        num_choices=st.integers(1, 3),
        is_group=st.booleans(),
        min_tokens=st.integers(0, 2),
        ignore_eos=st.booleans(),
        cache_salt=st.sampled_from([None, None, "salt"]),
        priority=st.integers(-2, 2),
        is_ready=st.sampled_from([True, True, False]),
    )
    def arrive(
        self,
        prefix: list[int],
        num_common: int,
        rest: list[int],
        max_tokens: int,
        num_choices: int,
        is_group: bool,
        min_tokens: int,
        ignore_eos: bool,
        cache_salt: str | None,
        priority: int,
        is_ready: bool,
    ) -> None:
        capacity = self.driver.scheduler.kv_capacity_tokens
        if not capacity:
            return
        prompt = (prefix[:num_common] + rest)[:capacity]
        max_tokens = min(max_tokens, capacity + 1 - len(prompt))
        leader = None
        for choice in range(num_choices):
            request = self.driver.add(
                prompt,
                max_tokens,
                seed=len(prompt),
                choice=choice,
                eos=(1,),
                stop=(2,),
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                cache_salt=cache_salt,
                priority=priority,
                leader=leader,
                is_ready=is_ready,
            )
            self.unready += [] if is_ready else [request]
            leader = leader or (request if is_group else None)

    @rule(prompt=st.lists(tokens, min_size=1, max_size=9), width=st.integers(1, 4), max_tokens=st.integers(1, 8))
    def search(self, prompt: list[int], width: int, max_tokens: int) -> None:
        if len(prompt) + max_tokens - 1 <= self.driver.scheduler.kv_capacity_tokens:
            params = SamplingParams(n=width, max_tokens=max_tokens, beam_search=BeamSearchOptions())
            beams = self.driver.search(prompt, params, EOS)
            self.searches[beams[0].request_id] = params

    @precondition(lambda self: self.unready)
    @rule(data=st.data())
    def make_ready(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.unready))
        self.unready.remove(request)
        self.driver.scheduler.make_ready(request.request_id)
        self.driver.scheduler.check()

    @precondition(lambda self: any(request.num_output_tokens for request in self.driver.requests.values()))
    @rule(num_good=st.integers(0, 3), num_bad=st.integers(0, 3))
    def draft(self, num_good: int, num_bad: int) -> None:
        for request in self.driver.requests.values():
            if request.finish_reason is None and not request.sampling_params.beam_search:
                self.driver.draft(request, num_good, num_bad)

    @precondition(lambda self: len(self.driver.in_flight) < self.num_steps_in_flight)
    @rule()
    def submit(self) -> None:
        self.driver.submit()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def collect(self) -> None:
        self.driver.collect()

    @rule(num_steps=st.integers(1, 10))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(list(self.driver.requests.values()))))

    @precondition(lambda self: self._with_output())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self._with_output()))
        self.driver.finish(request, data.draw(st.integers(1, request.num_output_tokens)))

    @precondition(lambda self: self.driver.in_flight)
    @rule(data=st.data())
    def fail_a_step(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(self.driver.in_flight))
        self.driver.executor.failing_step_ids.add(step.step_id)

    @precondition(lambda self: any(step.copies for step in self.driver.in_flight))
    @rule(data=st.data())
    def fail_copies(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from([step for step in self.driver.in_flight if step.copies]))
        self.driver.executor.failing_copy_step_ids.add(step.step_id)

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def fail_a_request(self, data: st.DataObject) -> None:
        self.driver.executor.failing_request_ids.add(data.draw(st.sampled_from(list(self.driver.requests))))

    @invariant()
    def counters_agree(self) -> None:
        stats = self.driver.scheduler.stats()
        reasons = Counter(r.finish_reason for r in self.driver.requests.values() if r.finish_reason is not None)
        assert {reason: num for reason, num in stats.num_finished.items() if num} == reasons
        assert stats.num_received == len(self.driver.requests)
        self.num_shown = max(self.num_shown, sum(r.num_output_tokens for r in self.driver.requests.values()))
        assert stats.num_generation_tokens == self.num_shown

    def _with_output(self) -> list[Request]:
        """Requests that a stop string may end: a beam's tokens are shown at its end alone."""
        requests = self.driver.requests.values()
        return [r for r in requests if r.num_output_tokens and r.sampling_params.beam_search is None]

    def _check_searches(self, ends: Counter[int]) -> None:
        """A search gives what it gives by itself, or nothing, if a beam of it failed or was aborted."""
        for first_id, params in self.searches.items():
            beams = [self.driver.requests[request_id] for request_id in range(first_id, first_id + params.n)]
            if all(beam.finish_reason in ("stop", "length") for beam in beams):
                expected = naive_beams(beams[0].prompt_token_ids, params, EOS, self.driver.windows)
                assert [self.driver.returned(beam) for beam in beams] == expected
            else:
                (reason,) = {beam.finish_reason for beam in beams}
                assert reason in ("abort", "error")
                assert {ends[beam.request_id] for beam in beams} == {int(reason == "error")}

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for request in self.unready:
            self.driver.scheduler.make_ready(request.request_id)
        self.driver.run()
        assert self.driver.scheduler.stats().num_used_blocks == 0
        ends = Counter(delta.request_id for delta in self.driver.deltas if delta.finish_reason is not None)
        assert max(ends.values(), default=1) == 1
        self._check_searches(ends)
        for request_id, request in self.driver.requests.items():
            if request.sampling_params.beam_search is not None:
                continue
            alone, returned = self.driver.alone(request), self.driver.returned(request)
            assert returned == alone[: len(returned)]
            assert request.output_token_ids == alone[: request.num_output_tokens]
            if ends[request_id] and request.finish_reason != "error":
                assert returned == alone
        # What stayed in the cache is as good as new.
        self.driver.executor.failing_step_ids.clear()
        self.driver.executor.failing_request_ids.clear()
        for prefix in PREFIXES:
            prompt = prefix[: self.driver.scheduler.kv_capacity_tokens]
            if not prompt:
                continue
            request = self.driver.add(prompt, max_tokens=1)
            self.driver.run()
            assert self.driver.returned(request) == self.driver.alone(request)


@pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])
def test_any_history_gives_each_request_the_output_it_has_alone(num_steps_in_flight: int) -> None:
    machine = type("Machine", (SchedulerMachine,), {"num_steps_in_flight": num_steps_in_flight})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )

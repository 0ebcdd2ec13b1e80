"""Scheduler: admission, budget, prefix hits, preemption, aborts and failures, one behaviour a test."""

from collections.abc import Callable

import pytest

from octavo.core.step import FinishReason, SchedulerOutput
from tests.core.fake_executor import naive_output
from tests.core.scheduler_driver import SchedulerDriver

BLOCK = 4
in_flight = pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * position) % 40 for position in range(num_tokens)]


def num_tokens(step: SchedulerOutput) -> list[int]:
    return [entry.num_tokens for entry in step.entries]


# ---- the ledger


@in_flight
def test_requests_give_together_what_they_give_alone(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight)
    for index in range(20):
        driver.add(prompt(1 + 3 * index % 17, index), 1 + index % 9, seed=index, eos=(3,), stop=(4,))
    driver.run()
    driver.check_all_exact()


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=10)
    driver.add(prompt(25), max_tokens=1)
    driver.run()
    assert [num_tokens(step) for step in driver.executor.steps] == [[10], [10], [5]]
    assert [[entry.num_logits for entry in step.entries] for step in driver.executor.steps] == [[0], [0], [1]]
    driver.check_all_exact()


def test_running_requests_keep_their_token_a_step_while_a_long_prompt_is_read() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=8)
    streams = [driver.add(prompt(2, index), max_tokens=20) for index in range(3)]
    driver.step()
    driver.add(prompt(40), max_tokens=2)
    for _ in range(8):
        step = driver.submit()
        assert step is not None
        assert step.request_ids[:3] == [request.request_id for request in streams]
        assert num_tokens(step) == [1, 1, 1, 5]
        assert {delta.request_id for delta in driver.collect()} >= {request.request_id for request in streams}
    driver.run()
    driver.check_all_exact()


def test_a_request_that_is_not_ready_lets_those_behind_it_go_first() -> None:
    driver = SchedulerDriver(max_num_seqs=2)
    first, *others = [driver.add(prompt(3, index), max_tokens=3, is_ready=index > 0) for index in range(4)]
    driver.run(until=lambda: all(request.finish_reason for request in others))
    assert driver.scheduler.stats().num_waiting == 1
    driver.scheduler.make_ready(first.request_id)
    driver.run()
    admitted = [new.request_id for step in driver.executor.steps for new in step.new_requests]
    assert admitted == [request.request_id for request in [*others, first]]
    driver.check_all_exact()


def test_a_request_that_fails_before_it_was_scheduled_is_over() -> None:
    driver = SchedulerDriver()
    request = driver.add(prompt(3), max_tokens=3, is_ready=False)
    (delta,) = driver.scheduler.fail(request.request_id, "no grammar")
    assert (delta.finish_reason, delta.error) == ("error", "no grammar")
    assert driver.scheduler.fail(request.request_id, "again") == []
    driver.scheduler.make_ready(request.request_id)
    driver.scheduler.check()
    assert not driver.scheduler.has_unfinished_requests


def test_requests_are_admitted_in_order_of_arrival() -> None:
    driver = SchedulerDriver(max_num_seqs=2)
    requests = [driver.add(prompt(3, index), max_tokens=2 + index) for index in range(5)]
    driver.run()
    admitted = [new.request_id for step in driver.executor.steps for new in step.new_requests]
    assert admitted == [request.request_id for request in requests]


def test_no_more_requests_run_than_a_step_has_tokens() -> None:
    driver = SchedulerDriver(max_num_seqs=8, max_num_batched_tokens=3)
    for index in range(6):
        driver.add(prompt(2, index), max_tokens=5)
    driver.run()
    assert max(len(step.request_ids) for step in driver.executor.steps) == 3
    driver.check_all_exact()


def test_decoding_goes_on_while_earlier_tokens_are_unknown() -> None:
    driver = SchedulerDriver(num_steps_in_flight=4)
    request = driver.add(prompt(3), max_tokens=3)
    assert [driver.submit() is not None for _ in range(4)] == [True, True, True, False]
    assert (request.num_tokens, request.num_computed_tokens, request.num_placeholders) == (6, 5, 3)
    driver.run()
    driver.check_all_exact()


def test_a_step_without_work_tells_the_runner_nothing() -> None:
    driver = SchedulerDriver()
    request = driver.add(prompt(3), max_tokens=1)
    driver.run()
    assert driver.scheduler.schedule().forgotten_request_ids == []
    driver.add(prompt(3, 1), max_tokens=1)
    driver.run()
    told = [step.forgotten_request_ids for step in driver.executor.steps]
    assert told == [[], [request.request_id]]


# ---- the end of a request


@in_flight
def test_tokens_sampled_after_a_stop_are_dropped(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight)
    free = driver.add(prompt(5), max_tokens=20)
    stop = naive_output(free)[6]
    request = driver.add(prompt(5), max_tokens=20, stop=(stop,))
    driver.run()
    end = naive_output(free).index(stop) + 1
    assert driver.returned(request) == naive_output(free)[:end]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    driver.check_all_exact()


@in_flight
def test_each_request_ends_with_exactly_one_reason(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight)
    for index in range(10):
        driver.add(prompt(4, index), max_tokens=6, seed=index, eos=(1, 2, 3, 4, 5, 6))
    driver.run()
    last = [(delta.request_id, delta.finish_reason) for delta in driver.deltas if delta.finish_reason is not None]
    assert sorted(last) == [(request.request_id, request.finish_reason) for request in driver.requests.values()]


@in_flight
def test_a_stop_string_found_outside_takes_later_tokens_back(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight)
    request, other = driver.add(prompt(5), max_tokens=20), driver.add(prompt(6), max_tokens=20)
    driver.run(until=lambda: len(driver.returned(request)) == 5)
    driver.finish(request, num_tokens=3)
    num_returned = len(driver.returned(request))
    driver.run()
    assert len(driver.returned(request)) == num_returned
    assert request.output_token_ids == naive_output(request)[:3]
    assert driver.scheduler.stats().num_generation_tokens == 3 + len(naive_output(other))
    assert driver.scheduler.stats().num_finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}


def test_the_generation_counter_never_falls() -> None:
    driver = SchedulerDriver()
    request = driver.add(prompt(5), max_tokens=20)
    for _ in range(6):
        driver.step()
    seen = driver.scheduler.stats().num_generation_tokens
    driver.finish(request, num_tokens=2)
    assert driver.scheduler.stats().num_generation_tokens == seen == 6
    driver.add(prompt(5), max_tokens=10)
    driver.run()
    assert driver.scheduler.stats().num_generation_tokens == 12


@in_flight
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted", "finished", "unknown"])
def test_abort_in_every_state(state: str, num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(
        num_steps_in_flight=num_steps_in_flight, num_blocks=10, max_num_seqs=2, max_num_batched_tokens=6
    )
    first = driver.add(prompt(24), max_tokens=16)
    second = driver.add(prompt(8, 1), max_tokens=24)
    third = driver.add(prompt(8, 2), max_tokens=1)
    victim = {"waiting": third, "prefill": first, "decode": first, "preempted": second, "finished": third}.get(state)
    conditions: dict[str, Callable[[], bool]] = {
        "waiting": lambda: True,
        "prefill": lambda: driver.was_scheduled(first) and not first.num_output_tokens,
        "decode": lambda: first.num_output_tokens > 2,
        "preempted": lambda: driver.was_scheduled(second) and not second.num_computed_tokens,
        "finished": lambda: third.finish_reason is not None,
        "unknown": lambda: True,
    }
    driver.run(until=conditions[state])
    assert conditions[state]()
    if victim is None:
        driver.scheduler.abort(999)
    else:
        num_returned = len(driver.returned(victim))
        driver.abort(victim)
        driver.abort(victim)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_used_blocks == 0
    for request in driver.requests.values():
        if request is victim and state != "finished":
            assert request.finish_reason == "abort"
            assert len(driver.returned(request)) == num_returned
        else:
            assert driver.returned(request) == naive_output(request)
    assert stats.num_finished["abort"] == (victim is not None and state != "finished")


@in_flight
def test_blocks_of_an_aborted_request_stay_until_its_steps_return(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight)
    request = driver.add(prompt(9), max_tokens=8)
    for _ in range(num_steps_in_flight):
        driver.submit()
    driver.abort(request)
    for _ in range(num_steps_in_flight):
        assert driver.scheduler.stats().num_used_blocks == 3
        assert driver.collect() == []
    assert driver.scheduler.stats().num_used_blocks == 0


# ---- failures


@in_flight
def test_a_failed_step_fails_its_requests_and_no_others(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, max_num_seqs=2)
    victims = [driver.add(prompt(4, index), max_tokens=8) for index in range(2)]
    spared = driver.add(prompt(4, 2), max_tokens=8)
    driver.executor.failing_step_ids = {3}
    driver.run()
    assert [request.finish_reason for request in victims] == ["error", "error"]
    errors = {delta.request_id: delta.error for delta in driver.deltas if delta.finish_reason == "error"}
    assert errors == dict.fromkeys([0, 1], "RuntimeError: the device is on fire")
    assert driver.returned(spared) == naive_output(spared)
    assert driver.scheduler.stats().num_used_blocks == 0


@in_flight
def test_blocks_of_a_failed_step_are_not_shared(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, max_num_batched_tokens=64)
    driver.executor.failing_step_ids = {0}
    driver.add(prompt(12), max_tokens=3)
    driver.run()
    again = driver.add(prompt(12), max_tokens=3)
    driver.run()
    assert driver.num_cached_tokens(again) == 0
    assert driver.returned(again) == naive_output(again)


def test_a_later_step_that_shares_blocks_of_a_failed_one_fails_too() -> None:
    driver = SchedulerDriver(num_steps_in_flight=3, max_num_batched_tokens=64)
    driver.executor.failing_step_ids = {0}
    writer = driver.add(prompt(12), max_tokens=8)
    driver.submit()
    sharer = driver.add(prompt(12) + prompt(8, 3), max_tokens=8)
    stranger = driver.add(prompt(12, 5), max_tokens=8)
    driver.submit()
    sharer_of_sharer = driver.add(prompt(12) + prompt(8, 3) + [1], max_tokens=8)
    driver.submit()
    assert driver.num_cached_tokens(sharer) == 12
    assert driver.num_cached_tokens(sharer_of_sharer) == 20
    driver.run()
    reasons = [request.finish_reason for request in (writer, sharer, sharer_of_sharer, stranger)]
    assert reasons == ["error", "error", "error", "length"]
    assert driver.returned(stranger) == naive_output(stranger)
    fresh = driver.add(sharer_of_sharer.prompt_token_ids, max_tokens=8)
    driver.run()
    assert driver.returned(fresh) == naive_output(fresh)


def test_blocks_computed_before_the_failed_step_stay_shared() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=64)
    driver.executor.failing_step_ids = {1}
    driver.add(prompt(12), max_tokens=8)
    driver.run()
    warm = driver.add(prompt(12), max_tokens=8)
    driver.run()
    assert driver.num_cached_tokens(warm) == 8
    assert driver.returned(warm) == naive_output(warm)


def test_a_step_that_could_not_be_submitted_fails_alone() -> None:
    driver = SchedulerDriver(num_steps_in_flight=2, max_num_seqs=1)
    done = driver.add(prompt(4), max_tokens=1)
    driver.run()
    first, second = driver.add(prompt(4, 1), max_tokens=4), driver.add(prompt(4, 2), max_tokens=4)
    driver.submit()
    step = driver.scheduler.schedule()
    driver.scheduler.fail_step(step, "no such device")
    driver.scheduler.check()
    driver.run()
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert driver.returned(second) == naive_output(second)
    told = [request_id for step in driver.executor.steps for request_id in step.forgotten_request_ids]
    assert told == [done.request_id, first.request_id]


def test_the_runner_is_told_again_what_to_forget_when_the_step_that_said_so_failed() -> None:
    driver = SchedulerDriver()
    done = driver.add(prompt(4), max_tokens=1)
    driver.run()
    driver.executor.failing_step_ids = {1}
    failed = driver.add(prompt(4, 1), max_tokens=1)
    driver.run()
    driver.add(prompt(4, 2), max_tokens=1)
    driver.run()
    assert driver.executor.steps[1].forgotten_request_ids == [done.request_id]
    assert driver.executor.steps[2].forgotten_request_ids == [done.request_id, failed.request_id]


@in_flight
def test_a_request_with_nan_logits_fails_alone_and_its_blocks_are_not_shared(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight)
    broken, sound = driver.add(prompt(12), max_tokens=5), driver.add(prompt(12, 1), max_tokens=5)
    driver.executor.failing_request_ids = {broken.request_id}
    driver.run()
    assert [request.finish_reason for request in (broken, sound)] == ["error", "length"]
    assert driver.deltas[0].error == "NaN in the logits"
    assert driver.returned(sound) == naive_output(sound)
    again = driver.add(prompt(12), max_tokens=5)
    driver.run()
    assert driver.num_cached_tokens(again) == 0
    assert driver.returned(again) == naive_output(again)


# ---- counters


@in_flight
def test_counters_add_up(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, max_num_seqs=3)
    requests = [driver.add(prompt(3 + index, index), max_tokens=5, seed=index, eos=(3, 4, 5)) for index in range(8)]
    assert driver.scheduler.stats().num_waiting == 8
    driver.step()
    driver.abort(requests[0])
    driver.abort(requests[7])
    driver.run()
    stats = driver.scheduler.stats()
    reasons: list[FinishReason] = ["stop", "length", "abort", "error"]
    assert stats.num_received == 8
    assert stats.num_finished == {
        reason: sum(request.finish_reason == reason for request in requests) for reason in reasons
    }
    assert stats.num_prompt_tokens == sum(3 + index for index in range(7))
    assert stats.num_generation_tokens == sum(len(request.output_token_ids) for request in requests)
    assert (stats.num_waiting, stats.num_running, stats.num_used_blocks) == (0, 0, 0)

"""Choices of one prompt: computed once, its blocks held once, and copied where a choice writes on."""

import pytest

from octavo.core.request import Request
from tests.core.fake_executor import naive_output
from tests.core.scheduler_driver import SchedulerDriver

BLOCK = 4
in_flight = pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])
lengths = pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 2])


def prompt(length: int) -> list[int]:
    return [(7 * position + 3) % 40 for position in range(length)]


def add_choices(driver: SchedulerDriver, length: int, num_choices: int, max_tokens: int = 9) -> list[Request]:
    leader = driver.add(prompt(length), max_tokens, seed=length)
    others = range(1, num_choices)
    return [leader, *(driver.add(prompt(length), max_tokens, seed=length, choice=i, leader=leader) for i in others)]


def num_computed(driver: SchedulerDriver) -> int:
    return sum(step.num_tokens for step in driver.executor.steps)


@in_flight
@lengths
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_each_choice_is_what_it_is_alone(length: int, enable_prefix_caching: bool, num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, enable_prefix_caching=enable_prefix_caching)
    add_choices(driver, length, 4)
    driver.run()
    driver.check_all_exact()
    assert num_computed(driver) == length + 4 * 8
    assert driver.scheduler.stats().num_used_blocks == 0


@lengths
def test_the_prompt_is_held_once(length: int) -> None:
    driver = SchedulerDriver(enable_prefix_caching=False)
    add_choices(driver, length, 4)
    num_blocks = -(-length // BLOCK)
    driver.step()
    assert driver.scheduler.stats().num_used_blocks == num_blocks
    driver.step()
    num_shared = length // BLOCK
    assert driver.scheduler.stats().num_used_blocks == num_shared + 4
    num_copies = [len(step.copies) for step in driver.executor.steps]
    assert num_copies == [0, 3 if length % BLOCK else 0]  # the last to write keeps the block
    driver.run()
    driver.check_all_exact()


@in_flight
def test_choices_wait_for_a_prompt_that_takes_several_steps(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, max_num_batched_tokens=5)
    add_choices(driver, 18, 3)
    driver.run()
    assert [len(step.new_requests) for step in driver.executor.steps[:4]] == [1, 0, 0, 2]
    driver.check_all_exact()
    assert num_computed(driver) == 18 + 3 * 8


def test_those_behind_go_first_while_choices_wait() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=8)
    add_choices(driver, 10, 2)
    newcomer = driver.add([1, 2], 4)
    driver.step()
    driver.step()
    assert driver.was_scheduled(newcomer)
    driver.run()
    driver.check_all_exact()


def test_choices_without_a_seat_are_admitted_later() -> None:
    driver = SchedulerDriver(max_num_seqs=2)
    requests = add_choices(driver, 9, 5)
    driver.step()
    assert [driver.was_scheduled(request) for request in requests] == [True, True, False, False, False]
    driver.run()
    driver.check_all_exact()


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_the_next_choice_computes_the_prompt_when_the_first_ends_early(how: str) -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4, enable_prefix_caching=False)
    first, *others = add_choices(driver, 10, 3)
    if how == "fail":
        driver.executor.failing_step_ids = {1}
    driver.step()
    if how == "abort":
        driver.abort(first)
    driver.run()
    assert first.finish_reason == ("abort" if how == "abort" else "error")
    assert [driver.returned(other) for other in others] == [naive_output(other) for other in others]


def test_an_aborted_follower_is_forgotten() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    first, second, third = add_choices(driver, 10, 3)
    driver.step()
    driver.abort(second)
    driver.run()
    assert not driver.returned(second)
    assert [driver.returned(other) for other in (first, third)] == [naive_output(first), naive_output(third)]


@in_flight
def test_choices_fail_with_the_step_that_computes_their_prompt_or_one_before_it(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, max_num_batched_tokens=8, block_size=16)
    requests = add_choices(driver, 15, 3)
    bystander = driver.add([5], 12)
    driver.executor.failing_step_ids = {1}
    driver.run()
    assert [request.finish_reason for request in requests] == ["error"] * 3
    again = add_choices(driver, 15, 3)
    driver.run()
    assert [driver.returned(request) for request in again] == [naive_output(request) for request in again]
    assert driver.returned(bystander) in ([], naive_output(bystander))


@pytest.mark.parametrize("failing_step_id", [0, 1])
def test_a_copy_of_a_block_that_a_failed_step_wrote_fails_too(failing_step_id: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=4, max_num_batched_tokens=8, block_size=16)
    requests = add_choices(driver, 15, 3)
    for _ in range(4):
        driver.submit()
    assert driver.executor.steps[2].copies
    driver.executor.failing_step_ids = {failing_step_id}
    driver.run()
    assert [request.finish_reason for request in requests] == ["error"] * 3


def test_nan_in_the_prompt_s_logits_fails_every_choice() -> None:
    driver = SchedulerDriver()
    requests = add_choices(driver, 6, 3)
    driver.executor.failing_request_ids = {requests[0].request_id}
    driver.run()
    assert [request.finish_reason for request in requests] == ["error"] * 3


@in_flight
def test_a_preempted_choice_changes_no_token(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, num_blocks=9)
    add_choices(driver, 10, 4, max_tokens=16)
    driver.run()
    driver.check_all_exact()
    assert driver.scheduler.stats().num_preemptions


@in_flight
def test_no_more_choices_run_than_a_step_has_tokens(num_steps_in_flight: int) -> None:
    """Each has one in every step: none stops in the midst of the others."""
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, max_num_seqs=8, max_num_batched_tokens=3)
    requests = add_choices(driver, 3, 8, max_tokens=12)
    driver.run(until=lambda: bool(requests[0].num_output_tokens))
    assert [driver.was_scheduled(request) for request in requests] == [True] * 3 + [False] * 5
    driver.run()
    driver.check_all_exact()
    for request in requests:
        steps = [i for i, step in enumerate(driver.executor.steps) if request.request_id in step.request_ids]
        assert steps[-1] - steps[0] < 12 + 2


@pytest.mark.parametrize("admission_policy", ["greedy", "predicted"])
def test_no_more_choices_begin_than_there_are_blocks_for_their_next_tokens(admission_policy: str) -> None:
    driver = SchedulerDriver(num_blocks=6, max_num_batched_tokens=2 * BLOCK, admission_policy=admission_policy)
    add_choices(driver, 2 * BLOCK, 8, max_tokens=3)
    driver.step()
    assert len(driver.executor.steps[0].entries) == 4
    driver.step()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.run()
    driver.check_all_exact()

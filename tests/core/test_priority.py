"""Scheduling by priority: the urgent go first, at the expense of the others' memory, and nobody waits for ever."""

import pytest

from octavo.core.request import Request
from octavo.core.scheduler import AGEING_STEPS
from tests.core.fake_executor import naive_output
from tests.core.scheduler_driver import SchedulerDriver

in_flight = pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * position) % 40 for position in range(num_tokens)]


def admitted(driver: SchedulerDriver) -> list[int]:
    return [new.request_id for step in driver.executor.steps for new in step.new_requests]


def test_the_lower_value_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    driver = SchedulerDriver(max_num_seqs=1, scheduling_policy="priority")
    for index, priority in enumerate([1, 0, 5, -3, 0]):
        driver.add(prompt(3, index), priority=priority)
    driver.run()
    assert admitted(driver) == [3, 1, 4, 0, 2]
    driver.check_all_exact()


def test_first_come_first_served_does_not_look_at_priorities() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    for index, priority in enumerate([1, 0, -3]):
        driver.add(prompt(3, index), priority=priority)
    driver.run()
    assert admitted(driver) == [0, 1, 2]
    assert driver.scheduler.stats().num_preemptions == 0


@in_flight
@pytest.mark.parametrize(("max_num_seqs", "num_blocks"), [(3, 64), (8, 12)])
def test_an_urgent_request_takes_the_place_of_the_least_urgent(
    max_num_seqs: int, num_blocks: int, num_steps_in_flight: int
) -> None:
    driver = SchedulerDriver(
        num_steps_in_flight=num_steps_in_flight,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        scheduling_policy="priority",
    )
    middle, least, last = (driver.add(prompt(8, i), max_tokens=9, priority=p) for i, p in enumerate([1, 3, 2]))
    driver.step()
    urgent = driver.add(prompt(16, 3), max_tokens=2, priority=0)
    driver.run(until=lambda: bool(urgent.num_output_tokens))
    assert least.finish_reason is None
    assert not least.num_computed_tokens
    assert all(request.num_computed_tokens for request in (middle, last))
    assert driver.scheduler.stats().num_preemptions == 1
    driver.run()
    driver.check_all_exact()


def test_no_more_are_preempted_than_needed() -> None:
    driver = SchedulerDriver(num_blocks=16, block_size=16, max_num_batched_tokens=200, scheduling_policy="priority")
    small = [driver.add(prompt(17, index), max_tokens=15, priority=1) for index in range(4)]  # two blocks each
    driver.step()
    urgent = driver.add(prompt(150, 9), max_tokens=1, priority=0)  # ten blocks
    driver.step()
    assert urgent.finish_reason == "length"
    assert [bool(request.num_computed_tokens) for request in small] == [True, True, True, False]
    driver.run()
    driver.check_all_exact()


def test_none_are_preempted_in_vain() -> None:
    driver = SchedulerDriver(num_blocks=16, block_size=16, max_num_batched_tokens=200, scheduling_policy="priority")
    driver.add(prompt(120), max_tokens=5, priority=0)  # eight blocks
    for index in range(2):
        driver.add(prompt(17, index), max_tokens=15, priority=1)  # two blocks each
    driver.step()
    urgent = driver.add(
        prompt(150, 9), max_tokens=1, priority=0
    )  # ten blocks: two more than the small ones would leave
    driver.step()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.run(until=lambda: urgent.finish_reason is not None)
    driver.run()
    driver.check_all_exact()


def test_equals_are_not_preempted_for_each_other() -> None:
    driver = SchedulerDriver(max_num_seqs=1, scheduling_policy="priority")
    running = driver.add(prompt(8), max_tokens=6)
    driver.step()
    driver.add(prompt(8, 1), max_tokens=6)
    driver.run(until=lambda: running.finish_reason is not None)
    assert driver.scheduler.stats().num_preemptions == 0


def test_decodes_have_their_token_while_a_more_urgent_prompt_is_read() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=8, scheduling_policy="priority")
    stream = driver.add(prompt(2), max_tokens=20, priority=1)
    driver.step()
    driver.add(prompt(40, 1), max_tokens=2, priority=0)
    driver.step()
    for _ in range(4):
        num_tokens = stream.num_output_tokens
        driver.step()
        assert stream.num_output_tokens == num_tokens + 1
    driver.run()
    driver.check_all_exact()


def test_a_stream_of_urgent_requests_does_not_starve_the_others() -> None:
    """As long as stated: the difference of the priorities times AGEING_STEPS."""
    driver = SchedulerDriver(max_num_seqs=1, scheduling_policy="priority")
    urgent: list[Request] = []

    def arrive_and_step() -> None:
        if not urgent or urgent[-1].finish_reason is not None:
            urgent.append(driver.add(prompt(2, len(urgent)), max_tokens=2, priority=0))
        driver.step()

    arrive_and_step()
    patient = driver.add(prompt(4), max_tokens=2, priority=2)
    for _ in range(2 * AGEING_STEPS - 4):
        arrive_and_step()
    assert not driver.was_scheduled(patient)
    for _ in range(8):
        arrive_and_step()
    assert patient.finish_reason == "length"
    assert driver.returned(patient) == naive_output(patient)


def test_room_is_made_for_what_the_others_take_in_the_same_step_too() -> None:
    """Four streams are about to take a block each: one has to go, once, and the urgent one comes at once."""
    driver = SchedulerDriver(num_blocks=12, scheduling_policy="priority", enable_prefix_caching=False)
    for index in range(4):
        driver.add(prompt(8, index), max_tokens=9, priority=1)  # two blocks, and a third with the next token
    driver.step()
    urgent = driver.add(prompt(5, 9), max_tokens=2, priority=0)  # two blocks
    driver.step()
    assert driver.was_scheduled(urgent)
    assert driver.scheduler.stats().num_preemptions == 1
    driver.run(until=lambda: urgent.finish_reason is not None)
    assert driver.scheduler.stats().num_preemptions == 1
    driver.run()
    driver.check_all_exact()


@in_flight
def test_nobody_else_takes_what_is_given_up(num_steps_in_flight: int) -> None:
    options = {"num_blocks": 16, "scheduling_policy": "priority", "enable_prefix_caching": False}
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, **options)  # type: ignore[arg-type]
    for index in range(5):
        driver.add(prompt(8, index), max_tokens=9, priority=1)
    driver.run(until=lambda: len(driver.executor.steps) > 1)
    urgent = driver.add(prompt(21, 9), max_tokens=2, priority=0)
    driver.run(until=lambda: driver.was_scheduled(urgent))
    num_preemptions = driver.scheduler.stats().num_preemptions
    assert 0 < num_preemptions <= 3
    driver.run()
    driver.check_all_exact()

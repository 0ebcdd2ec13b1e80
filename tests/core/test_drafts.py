"""Drafts: guessed tokens are computed like known ones, kept where they are what is sampled, else taken back."""

import pytest

from octavo.core.request import Request
from tests.core.scheduler_driver import SchedulerDriver

BLOCK = 4
in_flight = pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * position) % 40 for position in range(num_tokens)]


def run_with_drafts(driver: SchedulerDriver, num_good: int, num_bad: int) -> None:
    """Set drafts for every request before each step, until all are over."""

    def draft_all() -> bool:
        for request in driver.requests.values():
            if request.finish_reason is None:
                driver.draft(request, num_good, num_bad)
        return False

    driver.run(until=draft_all)
    driver.check_all_exact()


def decoded(driver: SchedulerDriver, request: Request) -> list[int]:
    """How many tokens of the request each step computed after its prompt."""
    entries = [entry for step in driver.executor.steps for entry in step.entries]
    return [
        entry.num_tokens
        for entry in entries
        if entry.request_id == request.request_id and entry.first_position >= request.num_prompt_tokens
    ]


@in_flight
@pytest.mark.parametrize(("num_good", "num_bad"), [(3, 0), (0, 3), (2, 2), (5, 1)])
def test_drafts_change_no_token(num_good: int, num_bad: int, num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, keeps_back_unsampled=True, block_size=BLOCK)
    for index in range(4):
        driver.add(prompt(3 + index, index), max_tokens=17, seed=index, eos=(3,))
    run_with_drafts(driver, num_good, num_bad)
    assert driver.scheduler.stats().num_used_blocks == 0


def test_good_drafts_save_steps() -> None:
    driver = SchedulerDriver()
    request = driver.add(prompt(5), max_tokens=13)
    run_with_drafts(driver, 3, 0)
    assert decoded(driver, request) == [4, 4, 4]


def test_bad_drafts_are_taken_back_with_their_blocks() -> None:
    driver = SchedulerDriver(block_size=BLOCK)
    request = driver.add(prompt(BLOCK - 1), max_tokens=20)
    driver.step()
    driver.draft(request, 1, 6)
    assert driver.submit() is not None
    assert request.num_computed_tokens == BLOCK - 1 + 1 + 7
    assert driver.scheduler.stats().num_used_blocks == 3
    driver.collect()
    assert (request.num_output_tokens, request.num_computed_tokens) == (3, BLOCK - 1 + 2)
    assert driver.scheduler.stats().num_used_blocks == 2
    driver.run()
    driver.check_all_exact()


def test_blocks_of_drafts_are_found_only_where_they_were_accepted() -> None:
    driver = SchedulerDriver(block_size=BLOCK)
    request = driver.add(prompt(BLOCK), max_tokens=BLOCK + 2)
    driver.step()
    driver.draft(request, 0, BLOCK)
    driver.submit()
    guessed = driver.executor.steps[-1].given_tokens[0].token_ids
    bad = request.token_ids + guessed
    driver.collect()
    driver.run()
    for tokens, num_cached in (([*request.token_ids, 1], 2 * BLOCK), ([*bad, 1], BLOCK)):
        again = driver.add(tokens, max_tokens=1)
        driver.run()
        assert driver.num_cached_tokens(again) == num_cached
    driver.check_all_exact()


def test_drafts_are_cut_at_max_tokens_and_an_accepted_stop_token() -> None:
    driver = SchedulerDriver()
    request = driver.add(prompt(5), max_tokens=4)
    driver.step()
    driver.draft(request, 9, 0)
    assert len(request.draft_token_ids) == 2  # the fourth token is sampled after them
    driver.run()
    output = driver.alone(driver.add(prompt(6), max_tokens=9))
    stopped = driver.add(prompt(6), max_tokens=9, stop=(output[3],))
    driver.run(until=lambda: stopped.num_output_tokens == 1)
    driver.scheduler.set_drafts(stopped.request_id, output[1:7])
    driver.run()
    driver.check_all_exact()
    assert driver.returned(stopped) == output[: output.index(output[3]) + 1]


def test_drafts_preempt_nobody() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=BLOCK, enable_prefix_caching=False)
    first, second = driver.add(prompt(BLOCK), max_tokens=4), driver.add(prompt(BLOCK, 1), max_tokens=4)
    driver.step()
    driver.draft(first, 2, 0)
    driver.draft(second, 2, 0)
    run_with_drafts(driver, 2, 0)
    assert driver.scheduler.stats().num_preemptions == 0


@in_flight
def test_a_step_has_tokens_for_others_before_drafts(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(
        num_steps_in_flight=num_steps_in_flight, max_num_batched_tokens=4, keeps_back_unsampled=True
    )
    for index in range(3):
        driver.add(prompt(2, index), max_tokens=9, seed=index)
    run_with_drafts(driver, 3, 0)
    assert all(step.num_tokens <= 4 for step in driver.executor.steps)


@in_flight
def test_where_a_step_is_kept_back_every_token_is_known_when_it_is_scheduled(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(
        num_steps_in_flight=num_steps_in_flight,
        keeps_back_unsampled=True,
        sends_sampled_tokens=True,
        num_blocks=12,
        max_num_seqs=4,
    )
    requests = [driver.add(prompt(3 + index, index), max_tokens=20, seed=index) for index in range(6)]
    driver.run(until=lambda: any(request.num_placeholders for request in requests))
    driver.check_all_exact()
    assert driver.scheduler.stats().num_preemptions > 0
    assert max(len(step.entries) for step in driver.executor.steps) > 1

"""The scheduler's blocks: what the prefix cache finds, and what becomes of requests that run out of blocks."""

import pytest

from octavo.core.block_pool import BlockKey
from tests.core.fake_executor import naive_output
from tests.core.scheduler_driver import SchedulerDriver

BLOCK = 4
in_flight = pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * position) % 40 for position in range(num_tokens)]


# ---- the prefix cache


@in_flight
@pytest.mark.parametrize("num_common", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 12])
def test_a_warm_prefix_changes_no_token(num_common: int, num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, block_size=BLOCK)
    driver.add(prompt(12), max_tokens=6)
    driver.run()
    warm = driver.add(prompt(12)[:num_common] + prompt(12 - num_common, 31), max_tokens=6, seed=5)
    driver.run()
    driver.check_all_exact()
    assert driver.num_cached_tokens(warm) == min(num_common, 11) // BLOCK * BLOCK
    assert driver.scheduler.stats().prefix_cache_hits == driver.num_cached_tokens(warm)
    assert driver.scheduler.stats().prefix_cache_queries == 24


def test_requests_that_arrive_together_share_their_prefix_in_the_same_step() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=64, block_size=BLOCK)
    requests = [driver.add(prompt(10), max_tokens=4, seed=9, choice=choice) for choice in range(3)]
    driver.submit()
    assert [entry.num_tokens for entry in driver.executor.steps[0].entries] == [10, 2, 2]
    driver.run()
    driver.check_all_exact()
    assert [driver.num_cached_tokens(request) for request in requests] == [0, 8, 8]


@in_flight
def test_generated_tokens_are_found_by_the_next_turn(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, block_size=BLOCK)
    first = driver.add(prompt(5), max_tokens=12)
    driver.run()
    second = driver.add(first.token_ids + prompt(3), max_tokens=4)
    driver.run()
    driver.check_all_exact()
    assert driver.num_cached_tokens(second) == 16


def test_different_salts_never_share() -> None:
    driver = SchedulerDriver()
    for salt in (None, "", "a", "b"):
        driver.add(prompt(12), cache_salt=salt)
        driver.run()
    assert driver.scheduler.stats().prefix_cache_hits == 0
    driver.add(prompt(12), cache_salt="b")
    driver.run()
    assert driver.scheduler.stats().prefix_cache_hits == 8


def test_without_prefix_caching_nothing_is_looked_up() -> None:
    driver = SchedulerDriver(enable_prefix_caching=False)
    for _ in range(2):
        driver.add(prompt(12))
        driver.run()
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)
    assert stats.num_prompt_tokens == 24
    driver.check_all_exact()


def test_a_request_that_waits_is_not_matched_again_until_what_it_looks_for_has_changed() -> None:
    driver = SchedulerDriver(num_blocks=40, block_size=BLOCK, max_num_batched_tokens=100)
    driver.add(prompt(60), max_tokens=1)
    driver.run()
    running = driver.add(prompt(80, 1), max_tokens=20)
    driver.step()
    waiting = driver.add(prompt(61) + prompt(19, 5), max_tokens=20)
    kv = driver.scheduler._kv
    num_found, find = 0, kv.pool.find

    def counted(key: BlockKey) -> int | None:
        nonlocal num_found
        num_found += 1
        return find(key)

    kv.pool.find = counted  # type: ignore[method-assign]
    driver.step()
    assert num_found > 15
    num_found = 0
    for _ in range(3):
        driver.step()
    assert (num_found, driver.was_scheduled(waiting)) == (0, False)
    driver.run(until=lambda: running.finish_reason is not None)
    driver.run()
    driver.check_all_exact()
    assert driver.num_cached_tokens(waiting) >= 8 * BLOCK


def test_turns_of_conversations_are_found_where_windows_have_left_much_behind() -> None:
    """Three of 188 tokens, whose last blocks take 92 of 320: those behind the windows are given up for them."""
    windows = (32,) * 5 + (0,)
    driver = SchedulerDriver(num_blocks=320, block_size=BLOCK, windows=windows, max_num_batched_tokens=32)
    talks = [prompt(180, start) for start in (0, 13, 29)]
    for turn in range(3):
        for index, talk in enumerate(talks):
            request = driver.add(list(talk), max_tokens=6)
            driver.run()
            num_known = len(talk) - 9 if turn else 0
            assert driver.num_cached_tokens(request) >= num_known // BLOCK * BLOCK
            talks[index] = request.token_ids + prompt(3, turn)
    driver.check_all_exact()


# ---- preemption


@in_flight
def test_preempted_requests_resume_and_change_no_token(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, num_blocks=10, block_size=BLOCK)
    for index in range(6):
        driver.add(prompt(6, index), max_tokens=20, seed=index)
    driver.run()
    driver.check_all_exact()
    assert driver.scheduler.stats().num_preemptions > 0
    assert any(step.reset_request_ids for step in driver.executor.steps)


def test_the_newest_are_preempted_first_and_resume_oldest_first_before_any_newcomer() -> None:
    driver = SchedulerDriver(num_blocks=6, block_size=BLOCK, enable_prefix_caching=False)
    first, second, third = (driver.add(prompt(8, index), max_tokens=9) for index in range(3))
    driver.submit()
    assert driver.executor.steps[0].request_ids == [0, 1, 2]
    driver.collect()
    driver.submit()
    assert driver.executor.steps[1].request_ids == [first.request_id, second.request_id]
    assert (third.num_computed_tokens, third.num_output_tokens) == (0, 1)
    newcomer = driver.add(prompt(1), max_tokens=1)
    driver.run()
    admitted = [
        request_id
        for step in driver.executor.steps
        for request_id in step.reset_request_ids + [new.request_id for new in step.new_requests]
    ]
    assert admitted == [0, 1, 2, second.request_id, third.request_id, newcomer.request_id]
    driver.check_all_exact()


def test_a_step_that_preempts_admits_nothing() -> None:
    driver = SchedulerDriver(num_blocks=6, block_size=BLOCK, enable_prefix_caching=False)
    for index in range(3):
        driver.add(prompt(8, index), max_tokens=9)
    driver.step()
    driver.add([1], max_tokens=1)
    driver.submit()
    assert driver.scheduler.stats().num_preemptions == 1
    assert driver.executor.steps[1].new_requests == []


def test_a_request_with_a_step_in_flight_is_not_preempted() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=BLOCK, enable_prefix_caching=False)
    for index in range(2):
        driver.add(prompt(8, index), max_tokens=9)
    driver.submit()
    assert driver.submit() is None
    assert driver.scheduler.stats().num_preemptions == 0
    driver.collect()
    driver.submit()
    assert driver.scheduler.stats().num_preemptions == 1
    driver.run()
    driver.check_all_exact()


def test_newer_requests_wait_for_an_older_one_that_lacks_a_block() -> None:
    driver = SchedulerDriver(num_steps_in_flight=2, num_blocks=4, block_size=BLOCK, enable_prefix_caching=False)
    older, newer = driver.add(prompt(8), max_tokens=9), driver.add(prompt(5, 1), max_tokens=9)
    driver.submit()
    assert driver.submit() is None  # the newer one has room, but has to be idle to be preempted
    driver.collect()
    step = driver.submit()
    assert step is not None
    assert step.request_ids == [older.request_id]
    assert newer.num_computed_tokens == 0
    driver.run()
    driver.check_all_exact()


def test_nothing_is_admitted_past_a_chunk_that_lacks_blocks() -> None:
    driver = SchedulerDriver(num_blocks=6, block_size=BLOCK, max_num_batched_tokens=13, enable_prefix_caching=False)
    driver.add(prompt(3), max_tokens=17)
    driver.step()
    chunked = driver.add(prompt(20, 1), max_tokens=1)
    driver.step()
    assert chunked.num_computed_tokens == 12
    newcomer = driver.add(prompt(1), max_tokens=1)
    driver.step()
    assert chunked.num_computed_tokens == 12
    assert not driver.was_scheduled(newcomer)
    driver.run()
    driver.check_all_exact()


def test_a_request_that_fills_the_pool_alone_completes_beside_others() -> None:
    driver = SchedulerDriver(num_blocks=5, block_size=BLOCK, max_num_batched_tokens=7)
    driver.add(prompt(12), max_tokens=9)
    driver.add(prompt(12, 1), max_tokens=9)
    driver.add(prompt(19, 2), max_tokens=2)
    driver.run()
    driver.check_all_exact()


@in_flight
def test_no_more_are_admitted_than_will_probably_fit_to_their_end(num_steps_in_flight: int) -> None:
    driver = SchedulerDriver(
        num_steps_in_flight=num_steps_in_flight, num_blocks=16, block_size=BLOCK, admission_policy="predicted"
    )
    for index in range(6):
        driver.add(prompt(8, index), max_tokens=20, seed=index)  # seven blocks in the end
    driver.step()
    assert driver.scheduler.stats().num_running == 2
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.check_all_exact()


def test_short_outputs_let_more_be_admitted() -> None:
    driver = SchedulerDriver(num_blocks=16, block_size=BLOCK, max_num_batched_tokens=64, admission_policy="predicted")
    for index in range(40):
        end = naive_output(driver.add(prompt(4, index), max_tokens=1))[0]
        driver.scheduler.abort(index * 2)
        driver.add(prompt(4, index), max_tokens=50, stop=(end,))
        driver.run()
    for index in range(3):
        driver.add(prompt(8, index), max_tokens=50)
    driver.step()
    assert driver.scheduler.stats().num_running == 2

"""The tier under the scheduler: what is swapped, kept and spilled, over the fake device."""

import pytest

from octavo.core.swap_cost import SwapCost, cheaper_preemption
from tests.core.scheduler_driver import SchedulerDriver

PROMPT = list(range(2, 34))


def crowded(**options: object) -> SchedulerDriver:
    """Two requests that don't both fit, run to their ends."""
    driver = SchedulerDriver(num_blocks=14, max_num_batched_tokens=64, **options)  # type: ignore[arg-type]
    driver.add(PROMPT[:20], max_tokens=20)
    driver.add(PROMPT[5:25], max_tokens=20, seed=1)
    driver.run()
    driver.check_all_exact()
    return driver


@pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_swapped_request_goes_on_where_it_was(num_steps_in_flight: int, enable_prefix_caching: bool) -> None:
    driver = crowded(
        num_steps_in_flight=num_steps_in_flight,
        enable_prefix_caching=enable_prefix_caching,
        num_swap_blocks=20,
        preemption_mode="swap",
    )
    stats = driver.scheduler.stats()
    assert stats.num_preemptions == stats.num_swap_preemptions > 0
    assert stats.num_blocks_swapped_in > 0
    num_computed = sum(step.num_tokens for step in driver.executor.steps)
    assert num_computed == 2 * (20 + 20 - 1)  # no token was computed twice


def test_a_recomputed_request_computes_its_tokens_again() -> None:
    driver = crowded(num_swap_blocks=20, preemption_mode="recompute", enable_prefix_caching=False)
    assert driver.scheduler.stats().num_swap_preemptions == 0
    assert sum(step.num_tokens for step in driver.executor.steps) > 2 * (20 + 20 - 1)


def test_a_tier_without_room_leaves_recomputing() -> None:
    driver = crowded(num_swap_blocks=2, preemption_mode="swap")
    assert driver.scheduler.stats().num_preemptions > driver.scheduler.stats().num_swap_preemptions == 0


def test_evicted_prefixes_come_back_from_the_tier() -> None:
    driver = SchedulerDriver(num_blocks=10, num_swap_blocks=20, copy_bytes_per_s=1e9)
    for start in (0, 100, 0):
        driver.add([start + i for i in range(24)], max_tokens=4)
        driver.run()
    driver.check_all_exact()
    stats = driver.scheduler.stats()
    assert stats.tier_prefix_cache_hits + 4 * 4 >= stats.prefix_cache_hits == 20
    assert stats.tier_prefix_cache_hits > 0


def test_blocks_that_are_quicker_to_compute_than_to_copy_are_not_kept() -> None:
    driver = SchedulerDriver(num_blocks=10, num_swap_blocks=20, copy_bytes_per_s=1e-9)
    for start in (0, 100, 0):
        driver.add([start + i for i in range(24)], max_tokens=4)
        driver.run()
    assert driver.scheduler.stats().num_blocks_swapped_out == 0


def test_requests_that_come_together_wait_for_one_copy_of_what_they_share() -> None:
    driver = SchedulerDriver(num_blocks=20, num_swap_blocks=40, copy_bytes_per_s=1e9)
    for start in (0, 100, 200):
        driver.add([start + i for i in range(24)], max_tokens=4)
        driver.run()
    before = driver.scheduler.stats().num_blocks_swapped_in
    for seed in range(3):
        driver.add(list(range(24)), max_tokens=4, seed=seed)
    driver.run()
    driver.check_all_exact()
    assert driver.scheduler.stats().num_blocks_swapped_in - before <= 5


@pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("num_prompt_tokens", [3, 31, 64, 90])
def test_a_sequence_longer_than_the_pool_is_completed(num_steps_in_flight: int, num_prompt_tokens: int) -> None:
    driver = SchedulerDriver(num_steps_in_flight=num_steps_in_flight, num_blocks=6, num_swap_blocks=24)
    driver.add([i % 40 for i in range(num_prompt_tokens)], max_tokens=121 - num_prompt_tokens)
    driver.add(PROMPT[:8], max_tokens=12)
    driver.run()
    driver.check_all_exact()
    assert driver.scheduler.stats().num_used_swap_blocks == 0


@pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("max_num_batched_tokens", [3, 32])
@pytest.mark.parametrize(("windows", "num_blocks"), [((0,), 5), ((6,), 4), ((6, 0), 5), ((6, 0), 12), ((9, 9, 0), 12)])
def test_a_sequence_of_as_many_tokens_as_pool_and_tier_hold_is_completed(
    windows: tuple[int, ...], num_blocks: int, max_num_batched_tokens: int, num_steps_in_flight: int
) -> None:
    driver = SchedulerDriver(
        num_steps_in_flight=num_steps_in_flight,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        windows=windows,
        num_swap_blocks=24,
    )
    capacity = min(driver.scheduler.kv_capacity_tokens, 150)
    assert capacity > 24 * 4
    driver.add([i % 40 for i in range(capacity - 9)], max_tokens=10)
    driver.add(PROMPT[:8], max_tokens=4)
    driver.run()
    driver.check_all_exact()
    assert driver.scheduler.stats().num_used_swap_blocks == 0


def test_a_sequence_longer_than_the_pool_is_swapped_with_its_windows() -> None:
    """It goes on where it was: only what its windows show comes back to the pool, and the last block of the others."""
    driver = SchedulerDriver(
        windows=(6, 0), num_blocks=8, num_swap_blocks=60, preemption_mode="swap", scheduling_policy="priority"
    )
    long = driver.add([i % 40 for i in range(80)], max_tokens=20, priority=1)
    driver.run(until=lambda: long.num_output_tokens > 4)
    driver.add(PROMPT[:12], max_tokens=12)
    driver.run()
    driver.check_all_exact()
    stats = driver.scheduler.stats()
    assert stats.num_swap_preemptions == stats.num_preemptions > 0
    assert 0 < stats.num_blocks_swapped_in <= stats.num_preemptions * (3 + 1)
    assert sum(step.num_tokens for step in driver.executor.steps) == (80 + 19) + (12 + 11)


@pytest.mark.parametrize(("windows", "num_blocks"), [((0,), 8), ((5, 0), 16)])
def test_others_run_beside_a_sequence_longer_than_the_pool(windows: tuple[int, ...], num_blocks: int) -> None:
    driver = SchedulerDriver(num_blocks=num_blocks, num_swap_blocks=24, windows=windows)
    long = driver.add([i % 40 for i in range(60)], max_tokens=30)
    driver.run(until=lambda: long.num_output_tokens > 2)
    short = driver.add(PROMPT[:8], max_tokens=4)
    driver.run(until=lambda: short.finish_reason is not None)
    assert long.finish_reason is None
    driver.run()
    driver.check_all_exact()


def test_nobody_is_admitted_into_what_the_next_step_of_a_long_prompt_takes() -> None:
    num_preemptions = {}
    for admission_policy in ("greedy", "predicted"):
        driver = SchedulerDriver(
            windows=(32, 32, 0), num_blocks=30, num_swap_blocks=90, admission_policy=admission_policy
        )
        driver.add([i % 40 for i in range(200)], max_tokens=20)
        driver.run(until=lambda driver=driver: len(driver.executor.steps) > 4)  # type: ignore[misc]
        driver.add(PROMPT[:4], max_tokens=20)
        driver.run()
        driver.check_all_exact()
        num_preemptions[admission_policy] = driver.scheduler.stats().num_preemptions
    assert num_preemptions["greedy"] > 4 > num_preemptions["predicted"]


def test_a_failed_write_closes_the_tier_and_nobody_else_notices() -> None:
    driver = SchedulerDriver(num_blocks=14, max_num_batched_tokens=64, num_swap_blocks=20, preemption_mode="swap")
    driver.executor.failing_copy_step_ids = set(range(1000))
    for seed in range(3):
        driver.add(PROMPT[seed : 20 + seed], max_tokens=20, seed=seed)
    driver.run()
    driver.check_all_exact()
    assert driver.scheduler.is_tier_closed
    assert driver.scheduler.kv_capacity_tokens == 14 * 4


@pytest.mark.parametrize(("windows", "num_blocks"), [((0,), 6), ((5, 0), 12)])
def test_a_long_sequence_fails_by_name_when_its_tier_does(windows: tuple[int, ...], num_blocks: int) -> None:
    driver = SchedulerDriver(num_blocks=num_blocks, num_swap_blocks=24, windows=windows)
    driver.executor.failing_copy_step_ids = set(range(1000))
    long, short = driver.add(PROMPT + PROMPT[:6], max_tokens=30), driver.add(PROMPT[:5], max_tokens=6)
    driver.run()
    assert (long.finish_reason, short.finish_reason) == ("error", "length")
    (message,) = [delta.error for delta in driver.deltas if delta.error]
    assert "--kv-cache-dir" in message
    assert "holds 24" in message


def test_a_block_that_can_not_be_read_back_is_computed_anew() -> None:
    driver = SchedulerDriver(num_blocks=10, num_swap_blocks=20, copy_bytes_per_s=1e9)
    for start in (0, 100):
        driver.add([start + i for i in range(24)], max_tokens=4)
        driver.run()
    driver.executor.failing_copy_step_ids = {len(driver.executor.steps)}
    driver.add(list(range(24)), max_tokens=4)
    driver.run()
    driver.check_all_exact()
    assert driver.executor.steps[-5].copies or any(step.copies for step in driver.executor.steps)


def test_the_cheaper_preemption_is_chosen() -> None:
    assert cheaper_preemption(100, 1000, tokens_per_s=10, bytes_per_s=1000) == "swap"
    assert cheaper_preemption(100, 1000, tokens_per_s=1000, bytes_per_s=1000) == "recompute"
    assert cheaper_preemption(100, 1000, tokens_per_s=10, bytes_per_s=1000, step_s=20) == "recompute"
    cost = SwapCost(tokens_per_s=1000, bytes_per_s=1000)
    assert cost.choose(100, 1000) == "recompute"
    for _ in range(30):
        cost.observe_prefill(100, seconds=10)
        cost.observe_copies(1000, seconds=1)
    assert cost.choose(100, 1000) == "swap"

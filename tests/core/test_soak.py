"""Many of requests in a pool that holds a fifth of what they need: none is lost, no block is, no token changes."""

from dataclasses import replace
from typing import Any

import pytest

from octavo.core.scheduler import Scheduler
from tests.core.soak import MAX_PROMPT_TOKENS, soak


@pytest.mark.parametrize(
    "options",
    [
        {"admission_policy": "greedy"},
        {"scheduling_policy": "priority", "kv_eviction_policy": "random", "num_steps_in_flight": 2},
    ],
)
def test_six_hundred_requests_under_pressure(options: dict[str, Any]) -> None:
    check_served(soak(600, **options), 600)


def test_a_hundred_and_fifty_requests_some_of_them_longer_than_the_pool() -> None:
    check_long_served((64, 64, 0), 150)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(0,), (64, 0), (64, 64, 64, 64, 64, 0)])
def test_two_thousand_requests_some_of_them_longer_than_the_pool(windows: tuple[int, ...]) -> None:
    check_long_served(windows, 2_000)


@pytest.mark.slow
def test_twenty_thousand_requests_under_pressure() -> None:
    check_served(soak(20_000, admission_policy="greedy"), 20_000)


def check_served(scheduler: Scheduler, num_requests: int) -> None:
    stats = scheduler.stats()
    assert stats.num_received == sum(stats.num_finished.values()) == num_requests
    assert stats.num_finished["abort"] > num_requests // 15
    assert stats.num_finished["error"] == stats.num_used_blocks == 0
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert stats.num_evicted_blocks > 0


def check_long_served(windows: tuple[int, ...], num_requests: int) -> None:
    scheduler = soak(
        num_requests,
        num_steps_in_flight=2,
        num_blocks=50 * len(windows),
        num_swap_blocks=300,
        preemption_mode="swap",
        admission_policy="greedy",
        group_windows=windows,
    )
    assert replace(scheduler.config, num_swap_blocks=0).kv_capacity_tokens < MAX_PROMPT_TOKENS / 2
    assert scheduler.stats().num_swap_preemptions > 0
    assert scheduler.stats().num_used_swap_blocks == 0
    check_served(scheduler, num_requests)

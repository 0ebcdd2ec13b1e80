"""Many of requests in a pool that holds a fifth of what they need: none is lost, no block is, no token changes."""

from typing import Any

import pytest

from octavo.core.scheduler import Scheduler
from tests.core.soak import soak


@pytest.mark.parametrize(
    "options",
    [
        {"admission_policy": "greedy"},
        {"scheduling_policy": "priority", "kv_eviction_policy": "random", "num_steps_in_flight": 2},
    ],
)
def test_six_hundred_requests_under_pressure(options: dict[str, Any]) -> None:
    check_served(soak(600, **options), 600)


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

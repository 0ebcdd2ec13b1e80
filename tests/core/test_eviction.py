"""Eviction policies: each gives up what its name says, never a used block, at the same cost in a large pool."""

import random
import time

import pytest

from octavo.core.block_pool import BlockPool
from octavo.core.eviction import EvictionPolicy, EvictionPolicyName, Fifo, Lru, Random, make_eviction_policy

NAMES: list[EvictionPolicyName] = ["lru", "fifo", "random"]


def evict_all(policy: EvictionPolicy) -> list[int]:
    return [policy.evict() for _ in range(len(policy))]


def test_lru_gives_up_the_least_recently_freed() -> None:
    policy = Lru()
    for block in (3, 1, 2):
        policy.add(block)
    policy.remove(3)
    policy.add(3)
    assert evict_all(policy) == [1, 2, 3]


def test_fifo_gives_up_the_first_freed_whatever_was_used_since() -> None:
    policy = Fifo()
    for block in (3, 1, 2):
        policy.add(block)
    policy.remove(3)
    policy.add(3)
    assert evict_all(policy) == [3, 1, 2]


def test_fifo_passes_a_used_block_over_and_gives_it_up_first_once_it_is_free() -> None:
    policy = Fifo()
    for block in (3, 1, 2):
        policy.add(block)
    policy.remove(3)
    assert policy.evict() == 1
    policy.add(3)
    assert evict_all(policy) == [3, 2]
    policy.add(3)  # with new content it is the newest
    policy.add(1)
    assert evict_all(policy) == [3, 1]


def test_random_gives_up_any_and_repeats_with_its_seed() -> None:
    def order(seed: int) -> list[int]:
        policy = Random(seed)
        for block in range(100):
            policy.add(block)
        return evict_all(policy)

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert sorted(order(1)) == list(range(100)) != order(1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_only_free_blocks_are_given_up_and_each_once(name: EvictionPolicyName, seed: int) -> None:
    """Against two plain sets, over random histories."""
    draw, policy = random.Random(seed), make_eviction_policy(name)
    free, used = set[int](), set(range(50))
    for _ in range(3_000):
        action = draw.choice(["add", "remove", "evict"])
        if action == "add" and used:
            block = draw.choice(sorted(used))
            policy.add(block)
            used.remove(block)
            free.add(block)
        elif action == "remove" and free:
            block = draw.choice(sorted(free))
            policy.remove(block)
            free.remove(block)
            used.add(block)
        elif action == "evict" and free:
            block = policy.evict()
            free.remove(block)
            used.add(block)
        assert len(policy) == len(free)
    assert set(evict_all(policy)) == free


@pytest.mark.parametrize("name", NAMES)
def test_the_pool_keeps_its_invariants_with_every_policy(name: EvictionPolicyName) -> None:
    draw, pool, tables = random.Random(0), BlockPool(20, make_eviction_policy(name)), list[list[int]]()
    for step in range(2_000):
        if draw.random() < 0.5 and pool.num_free >= 3:
            tables.append(pool.allocate(3))
            for block in tables[-1][: draw.randrange(4)]:
                pool.register(block, (0, draw.randbytes(1)))
        elif tables:
            pool.release(tables.pop(draw.randrange(len(tables))))
        found = pool.find((0, draw.randbytes(1)))
        if found is not None and draw.random() < 0.5:
            pool.share([found])
            tables.append([found])
        if step % 7 == 0:
            pool.forget(draw.randrange(20))
        pool.check(tables)
    assert pool.num_evicted > 100


@pytest.mark.parametrize("name", NAMES)
def test_operations_cost_no_more_in_a_large_pool(name: EvictionPolicyName) -> None:
    """On average: what is linear in the blocks would cost a hundred times as much."""

    def cost(num_blocks: int) -> float:
        policy = make_eviction_policy(name)
        start = time.process_time()
        for block in range(num_blocks):
            policy.add(block)
        for block in range(0, num_blocks, 2):
            policy.remove(block)
        for block in range(num_blocks // 2):
            policy.add(block) if block % 2 == 0 else policy.evict()
        return (time.process_time() - start) / num_blocks

    assert cost(200_000) < 25 * min(cost(2_000) for _ in range(5))

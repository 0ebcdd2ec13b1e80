"""KV pools of every device: blocks are copied in every cache, in order, within the pool and to the tier and back."""

from pathlib import Path

import pytest
import torch

from octavo.devices.device import KVLayout, KVPool
from octavo.devices.registry import open_device

NUM_BLOCKS, NUM_TIER_BLOCKS = 4, 3


@pytest.fixture(params=["reference", "cpu"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> KVPool:
    layout = KVLayout(2, NUM_BLOCKS, 16, 2, 16, torch.float32, NUM_TIER_BLOCKS, str(tmp_path))
    return open_device(request.param).make_kv_pool(layout)


def marks(pool: KVPool) -> list[list[float]]:
    """One number of each block, in each cache."""
    return [cache.flatten(1)[:, 7].tolist() for cache in pool.caches]


def test_blocks_are_copied_in_order_in_every_cache(pool: KVPool) -> None:
    for number, cache in enumerate(pool.caches):
        for block in range(NUM_BLOCKS):
            cache[block] = 10 * number + block + 1
    out = [(0, 4), (1, 6), (2, 0), (0, 1)]  # two to the tier, and then within the pool: the latter sees the former
    assert pool.copy(out).failed == []
    assert marks(pool) == [[3, 3, 3, 4, 1, 0, 2], [13, 13, 13, 14, 11, 0, 12]]
    assert pool.copy([(6, 2), (4, 3)]).failed == []
    assert marks(pool) == [[3, 3, 2, 1, 1, 0, 2], [13, 13, 12, 11, 11, 0, 12]]
    assert pool.copy([]).failed == []


def test_the_rate_of_copies_is_positive_with_a_tier_and_without(pool: KVPool) -> None:
    assert pool.measure_copy_rate() > 0
    for device in ("reference", "cpu"):
        without = open_device(device).make_kv_pool(KVLayout(1, 2, 16, 2, 16, torch.bfloat16))
        assert without.measure_copy_rate() > 0
        assert [tuple(cache.shape) for cache in without.caches] == [(2, 2, 2, 16, 16)]

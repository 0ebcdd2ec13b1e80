"""BlockPool: reference counts, lazy eviction in order, and hashes that can't be confused."""

import hashlib

import pytest

from octavo.core.block_pool import BlockPool, hash_block, root_hash


def key(name: str) -> tuple[int, bytes]:
    return 0, hashlib.sha256(name.encode()).digest()


def test_a_freed_block_is_found_until_it_is_reused() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, key("a"))
    pool.release([block])
    assert pool.find(key("a")) == block
    pool.allocate(2)
    assert pool.find(key("a")) is None
    pool.check([[0, 1]])


def test_blocks_are_evicted_least_recently_freed_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.register(block, key(str(block)))
    for block in (1, 2, 0):
        pool.release([block])
    assert pool.allocate(3) == [1, 2, 0]


def test_a_block_without_a_hash_is_reused_before_any_with_one() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.register(first, key("a"))
    pool.register(third, key("c"))
    pool.release([first, second, third])
    assert pool.allocate(1) == [second]


def test_sharing_a_free_block_keeps_it_from_being_reused() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, key("a"))
    pool.release([block])
    pool.share([block])
    (other,) = pool.allocate(1)
    assert other != block
    assert pool.num_free == 0
    pool.check([[block], [other]])


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_used == 1
    pool.release([block])
    assert pool.num_used == 0


def test_the_first_of_two_equal_blocks_is_found_and_the_second_carries_no_hash() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, key("a"))
    pool.register(second, key("a"))
    assert pool.find(key("a")) == first
    assert pool.key(second) is None
    pool.forget(second)
    assert pool.find(key("a")) == first
    pool.check([[first, second]])


def test_a_forgotten_block_is_not_found() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, key("a"))
    pool.forget(block)
    assert pool.find(key("a")) is None
    pool.check([[block]])


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, (0, root_hash(None)))
    assert pool.find((1, root_hash(None))) is None


def test_a_hash_is_sha256_over_parent_and_little_endian_tokens() -> None:
    parent = root_hash(None)
    encoded = b"\x01\x00\x00\x00" + b"\x00\x01\x00\x00" + b"\xff\xff\xff\x7f"
    assert hash_block(parent, [1, 256, 2**31 - 1]) == hashlib.sha256(parent + encoded).digest()


@pytest.mark.parametrize("other", [None, "", "a", "ab", "octavo", "\ud800"])
def test_each_salt_has_a_root_of_its_own(other: str | None) -> None:
    assert (root_hash(other) == root_hash("ab")) == (other == "ab")


def test_check_notices_a_table_the_counts_do_not_know() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check([[0], [1]])


def test_what_a_window_left_behind_is_given_up_before_what_a_later_turn_looks_for() -> None:
    pool = BlockPool(4)
    early, late, found, blank = pool.allocate(4)
    for block_id in (early, late, found):
        pool.register(block_id, (0, bytes([block_id])))
    pool.share([found])
    pool.release([found])
    pool.release([early])  # the last of a turn, freed first
    pool.release([late, found], are_spent=True)  # behind a window since, the second found by its key before
    pool.release([blank])
    assert pool.allocate(4) == [blank, late, early, found]

"""KVCacheManager: tables that only grow, and prefixes that are shared exactly where they are equal."""

import time
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from octavo.core.kv_cache_manager import NULL_BLOCK, KVCacheManager
from octavo.core.kv_geometry import KVGeometry
from octavo.core.kv_groups import most_blocks
from octavo.core.request import Request
from octavo.sampling_params import SamplingParams

BLOCK = 4


def make_kv(num_blocks: int, windows: Sequence[int] = (0,), num_tier_blocks: int = 0, **options: Any) -> KVCacheManager:
    geometry = KVGeometry(tuple(windows), BLOCK, num_blocks, num_tier_blocks=num_tier_blocks)
    return KVCacheManager(geometry, **options)


def make_request(request_id: int, prompt: list[int], cache_salt: str | None = None) -> Request:
    nothing = frozenset[int]()
    return Request(request_id, prompt, SamplingParams(), 16, nothing, nothing, seed=0, cache_salt=cache_salt)


def compute(kv: KVCacheManager, request: Request) -> list[int]:
    """Admit the request, schedule its whole prompt, and return its table."""
    prefix = kv.match_prefix(request)
    kv.open(request, prefix)
    request.num_computed_tokens = len(prefix[0]) * BLOCK
    assert kv.allocate(request, request.gap) is not None
    request.num_computed_tokens += request.gap
    kv.register_full_blocks(request)
    return kv.tables.copy(request.request_id)[0]


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(
    ("num_common", "num_shared_blocks"),
    [(BLOCK - 1, 0), (BLOCK, 1), (BLOCK + 1, 1), (2 * BLOCK, 2), (2 * BLOCK + 3, 2), (3 * BLOCK, 3)],
)
def test_full_common_blocks_are_shared(num_common: int, num_shared_blocks: int, num_groups: int) -> None:
    kv = make_kv(64, [0] * num_groups)
    first = make_request(0, list(range(20)))
    compute(kv, first)
    second = make_request(1, [*range(num_common), *range(30, 40)])
    prefix = kv.match_prefix(second)
    assert prefix == tuple(table[:num_shared_blocks] for table in kv.tables.copy(first.request_id))
    compute(kv, second)
    kv.check({0: first, 1: second})


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_the_last_token_of_a_known_prompt_is_left_to_compute(num_tokens: int) -> None:
    kv = make_kv(64)
    prompt = list(range(num_tokens))
    compute(kv, make_request(0, prompt))
    (hit,) = kv.match_prefix(make_request(1, prompt))
    assert len(hit) == (num_tokens - 1) // BLOCK


def test_looking_for_a_prefix_changes_nothing() -> None:
    kv = make_kv(8)
    first = make_request(0, list(range(10)))
    compute(kv, first)
    kv.free(first)
    second = make_request(1, list(range(10)))
    assert kv.match_prefix(second) == kv.match_prefix(second)
    assert kv.can_hold(second, kv.match_prefix(second))
    assert kv.pool.num_free == 8
    kv.check({})


def test_a_salt_sets_caches_apart() -> None:
    kv = make_kv(64)
    prompt = list(range(3 * BLOCK))
    for request_id, salt in enumerate([None, "", "a", "b"]):
        request = make_request(request_id, prompt, salt)
        assert kv.match_prefix(request) == ([],)
        compute(kv, request)
    assert len(kv.match_prefix(make_request(9, prompt, "a"))[0]) == 2


def test_a_block_is_found_only_after_the_same_beginning() -> None:
    kv = make_kv(64)
    compute(kv, make_request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert kv.match_prefix(make_request(1, [0, 2, 3, 4, 5, 6, 7, 8, 9])) == ([],)
    assert kv.match_prefix(make_request(2, [5, 6, 7, 8, 9])) == ([],)


def test_the_tail_of_a_freed_request_is_evicted_before_its_head() -> None:
    kv = make_kv(5)
    first = make_request(0, list(range(4 * BLOCK)))
    table = compute(kv, first)
    kv.free(first)
    kv.pool.allocate(3)  # the block never used, then the last two of the table
    assert kv.match_prefix(make_request(1, list(range(20)))) == (table[:2],)


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    kv = make_kv(64, enable_prefix_caching=False)
    first, second = make_request(0, list(range(20))), make_request(1, list(range(20)))
    compute(kv, first)
    assert kv.match_prefix(second) == ([],)
    assert kv.index.known_hashes(first.request_id) == ()


def test_too_few_free_blocks_change_nothing() -> None:
    kv = make_kv(2)
    request = make_request(0, list(range(3 * BLOCK)))
    assert not kv.can_hold(request, kv.match_prefix(request))
    kv.open(request, ([],))
    assert kv.allocate(request, 3 * BLOCK) is None
    assert kv.pool.num_free == 2
    assert kv.allocate(request, 2 * BLOCK) == ([0, 1],)


def test_blocks_shared_with_a_running_request_need_no_room() -> None:
    kv = make_kv(4)
    compute(kv, make_request(0, list(range(3 * BLOCK))))
    second = make_request(1, [*range(2 * BLOCK), 99])
    assert kv.can_hold(second, kv.match_prefix(second))
    assert not kv.can_hold(second, ([],))


def test_forgotten_blocks_and_what_follows_them_are_not_found() -> None:
    kv = make_kv(64)
    first = make_request(0, list(range(20)))
    table = compute(kv, first)
    kv.index.forget(kv.tables.block_ids(0, from_position=BLOCK + 1))
    assert kv.match_prefix(make_request(1, list(range(20)))) == (table[:1],)


def test_a_token_that_is_not_known_yet_keeps_its_block_from_being_found() -> None:
    kv = make_kv(64)
    first = make_request(0, list(range(BLOCK - 1)))
    compute(kv, first)
    first.num_placeholders, first.num_steps_in_flight = 1, 1
    assert kv.allocate(first, 1) == ([],)
    first.num_computed_tokens += 1
    kv.register_full_blocks(first)
    follower = make_request(1, [*range(BLOCK - 1), 7, 8])
    assert kv.match_prefix(follower) == ([],)
    first.num_placeholders = 0
    first.append(7)
    kv.register_full_blocks(first)
    assert kv.match_prefix(follower) == kv.tables.copy(first.request_id)


def decode(kv: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Compute so many more tokens, one a step."""
    for token_id in range(num_tokens):
        request.num_placeholders = 1
        assert kv.allocate(request, 1) is not None
        request.num_computed_tokens += 1
        request.num_placeholders = 0
        request.append(token_id)
        kv.register_full_blocks(request)
        kv.free_unseen(request, request.num_computed_tokens)
        kv.check({request.request_id: request})


def test_blocks_outside_the_window_are_freed_and_their_entries_null() -> None:
    kv = make_kv(64, [6, 0])
    request = make_request(0, list(range(10)))
    compute(kv, request)
    kv.free_unseen(request, 10)  # the next token sees positions 5 to 10
    windowed, full = kv.tables.copy(request.request_id)
    assert windowed[0] == NULL_BLOCK
    assert NULL_BLOCK not in (*windowed[1:], *full)
    assert kv.pool.num_used == 2 + 3


def test_a_group_with_a_window_holds_no_more_blocks_however_long_the_request() -> None:
    kv = make_kv(8, [6])
    request = make_request(0, [1, 2, 3])
    request.max_tokens = 1000
    compute(kv, request)
    request.append(0)
    decode(kv, request, 100)
    assert kv.pool.num_used <= most_blocks(6, 1000, BLOCK, 1)


def test_what_a_preemption_costs_counts_all_tokens_though_windows_have_few_blocks() -> None:
    kv = make_kv(32, [6, 6, 0], num_tier_blocks=1)
    request, sharer = (make_request(i, list(range(20 + i))) for i in range(2))
    compute(kv, request)
    kv.free_unseen(request, 20)  # the next token sees positions 15 to 20
    assert kv.residency is not None
    assert kv.residency.swap_cost(request) == (20, 2 * (2 + 2 + 5))
    compute(kv, sharer)
    assert kv.residency.swap_cost(request) == (0, 0)


@pytest.mark.parametrize("windows", [[0], [6], [2], [6, 0], [9, 2]])
def test_a_prefix_is_reused_where_all_that_its_next_token_sees_is_cached(windows: list[int]) -> None:
    """Against a search through every length, whatever has been evicted."""
    random = Random(1)
    found = set()
    for _ in range(200):
        kv = make_kv(64, windows)
        first = make_request(0, list(range(8 * BLOCK)))
        compute(kv, first)
        tables = kv.tables.copy(first.request_id)
        gone = {block_id for table in tables for block_id in random.sample(table, k=random.randint(0, 3))}
        kv.index.forget(gone)
        expected = 0
        for num_blocks in range(1, 8):
            position = num_blocks * BLOCK
            seen = [range(max(position - window + 1, 0) if window else 0, position) for window in windows]
            needed = [{table[p // BLOCK] for p in positions} for table, positions in zip(tables, seen, strict=True)]
            if gone.isdisjoint(set().union(*needed)):
                expected = num_blocks
        second = make_request(1, list(range(8 * BLOCK)))
        prefix = kv.match_prefix(second)
        assert {len(block_ids) for block_ids in prefix} == {expected}
        found.add(expected)
        compute(kv, second)
        for request in (first, second):
            kv.free_unseen(request, request.num_computed_tokens)
        kv.check({0: first, 1: second})
    assert len(found) > 2


def test_what_a_failed_request_computed_is_not_found_even_out_of_its_window() -> None:
    kv = make_kv(64, [3])
    request = make_request(0, list(range(20)))
    compute(kv, request)
    kv.free_unseen(request, 20)
    kv.index.forget_prefixes(request)
    assert kv.match_prefix(make_request(1, list(range(20)))) == ([],)


def test_swapping_out_takes_time_that_grows_with_the_blocks_alone() -> None:
    kv = make_kv(40_000, num_tier_blocks=40_000)
    request = make_request(0, [1] * (40_000 * BLOCK - 1))
    compute(kv, request)
    start_s = time.process_time()
    assert kv.swap_out(request)
    assert time.process_time() - start_s < 5  # a look at every block for every block took minutes

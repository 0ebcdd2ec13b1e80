"""Groups of layers that one pool of blocks can serve, and how many blocks their tables hold at most."""

import pytest

from octavo.core.kv_groups import KVGroup, capacity_tokens, group_layers, most_blocks, resident_share

GEMMA = [None if layer % 6 == 5 else 512 for layer in range(18)]


def test_layers_of_one_window_are_one_group() -> None:
    assert group_layers([None] * 4) == (KVGroup((0, 1, 2, 3), 0),)
    assert group_layers([4096] * 2) == (KVGroup((0, 1), 4096),)
    assert group_layers([]) == ()


def test_groups_have_as_many_layers_as_the_rarer_kind() -> None:
    groups = group_layers(GEMMA)
    assert [group.window for group in groups] == [512] * 5 + [0]
    assert groups[-1].layers == (5, 11, 17)
    assert {len(group.layers) for group in groups} == {3}
    assert sorted(layer for group in groups for layer in group.layers) == list(range(18))


def test_the_last_group_of_a_kind_may_be_smaller() -> None:
    assert [len(group.layers) for group in group_layers([8, 8, None, 8, None, 8, 8])] == [2, 2, 1, 2]


@pytest.mark.parametrize("window", [1, 2, 7, 16, 17, 40])
@pytest.mark.parametrize("step_tokens", [1, 5, 16, 50])
def test_a_windowed_group_never_holds_more_blocks_than_are_counted(window: int, step_tokens: int) -> None:
    block_size = 16
    held = []
    for computed in range(200):  # the last step begins here, whatever the steps before it were
        first_block = max(computed - window + 1, 0) // block_size
        held.append(-(-(computed + step_tokens) // block_size) - first_block)
    assert max(held) <= most_blocks(window, 1000, block_size, step_tokens) <= max(held) + 1
    assert most_blocks(window, 3, block_size, step_tokens) == 1


def test_a_window_lets_one_request_be_longer_than_the_pool() -> None:
    assert capacity_tokens([0], 100, 16, 32) == 1600
    assert capacity_tokens([0, 0], 101, 16, 32) == 800
    assert capacity_tokens([64, 0], 100, 16, 32) == (100 - most_blocks(64, 1000, 16, 32)) * 16
    assert capacity_tokens([64], most_blocks(64, 1000, 16, 32), 16, 32) > 1_000_000
    assert capacity_tokens([64], 3, 16, 32) == 48


def test_a_request_longer_than_the_pool_keeps_half_of_it_or_a_few_blocks() -> None:
    assert resident_share([0], 100, 16) == 50
    assert resident_share([0, 0], 101, 16) == 25
    assert resident_share([64, 0], 100, 16) == (50 - 5) // 2
    assert [resident_share([64, 0], num_blocks, 16) for num_blocks in (6, 7, 9, 13, 20)] == [0, 1, 2, 4, 4]


def test_a_tier_holds_what_no_window_needs_if_the_pool_holds_the_windows_and_a_step() -> None:
    assert capacity_tokens([0], 100, 16, 32, 60) == 2560
    assert capacity_tokens([0, 0], 101, 16, 32, 60) == 1280
    assert capacity_tokens([64, 0], 100, 16, 32, 60) == (100 + 60 - most_blocks(64, 1000, 16, 32)) * 16
    # The smallest pool: of each window what a token sees before its own block, and a block in each group for the step.
    assert capacity_tokens([64, 64, 0], 2 * 5 + 3, 16, 32, 60) == (13 + 60 - 2 * 6) * 16
    assert capacity_tokens([64, 64, 0], 2 * 5 + 2, 16, 32, 60) == capacity_tokens([64, 64, 0], 12, 16, 32) == 64
    assert capacity_tokens([64], 6, 16, 32, 60) > 1_000_000 > capacity_tokens([64], 6, 16, 32)


@pytest.mark.parametrize("num_tier_blocks", [1, 10, 1000])
@pytest.mark.parametrize("num_blocks", [1, 7, 20, 400])
@pytest.mark.parametrize("windows", [[0], [5], [16, 0], [40, 40, 0], [64] * 5 + [0]])
def test_a_tier_never_makes_the_longest_request_shorter(
    windows: list[int], num_blocks: int, num_tier_blocks: int
) -> None:
    alone = capacity_tokens(windows, num_blocks, 16, 32)
    assert alone <= capacity_tokens(windows, num_blocks, 16, 32, num_tier_blocks)

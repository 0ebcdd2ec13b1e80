import numpy as np
import pytest

from octavo.kernels.philox import philox, uniform

# Known answers published with Random123 (philox4x32, 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert words[:, 0].tolist() == list(expected)


def test_uniform_numbers_are_spread_evenly_and_lie_below_one() -> None:
    count = 20_000
    numbers = uniform(np.zeros(count, np.uint64), np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    histogram, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.abs(histogram - count / 20).max() < 5 * (count / 20) ** 0.5


def test_a_number_depends_on_seed_choice_and_position_alone() -> None:
    alone = uniform(np.array([7], np.uint64), np.array([1], np.uint32), np.array([30], np.uint32))
    seeds, choices = np.array([3, 7, 7, 8], np.uint64), np.array([1, 1, 2, 1], np.uint32)
    together = uniform(seeds, choices, np.array([30, 30, 30, 30], np.uint32))
    assert together[1] == alone[0]
    assert len(set(together.tolist())) == 4

"""Counter-based uniform numbers: Philox-4x32-10 (Salmon et al., 2011), vectorised over requests."""

import numpy as np
import numpy.typing as npt

__all__ = ["uniform"]

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)


def philox(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """counter [4, S] and key [2, S], each of 32-bit words -> [4, S] random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> WORD) ^ c1 ^ k0, product1 & LOW, (product0 >> WORD) ^ c3 ^ k1, product0 & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return np.stack((c0, c1, c2, c3))


def uniform(
    seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.uint32], positions: npt.NDArray[np.uint32]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice, position), all [S]."""
    zero = np.zeros(len(seeds), dtype=np.uint64)
    counter = np.stack((positions.astype(np.uint64), choices.astype(np.uint64), zero, zero))
    words = philox(counter, np.stack((seeds & LOW, seeds >> WORD)))
    bits = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    numbers: npt.NDArray[np.float64] = np.ldexp(bits.astype(np.float64), -53)
    return numbers

"""Random GGUF blocks whose scales are numbers of moderate size."""

import gguf
import numpy as np

__all__ = ["BLOCK_BYTES", "HALVES", "finite_blocks", "random_bytes"]

BLOCK_BYTES = {kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
"""By name: values and bytes of a block."""
HALVES = {  # where each type has float16 numbers
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_bytes(dtype_name: str, num_values: int, seed: int) -> np.ndarray:
    block_size, block_bytes = BLOCK_BYTES[dtype_name]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, num_values // block_size * block_bytes, np.uint8)


def finite_blocks(dtype_name: str, shape: tuple[int, int], seed: int, size: float = 0.01) -> np.ndarray:
    """[num_blocks, block_bytes]; `size`: of a scale."""
    blocks = random_bytes(dtype_name, int(np.prod(shape)), seed).reshape(-1, BLOCK_BYTES[dtype_name][1])
    scales = (np.random.default_rng(seed).standard_normal((len(blocks), 2)) * size).astype(np.float16)
    for index, start in enumerate(HALVES[dtype_name]):
        blocks[:, start : start + 2] = scales[:, index : index + 1].copy().view(np.uint8)
    return blocks

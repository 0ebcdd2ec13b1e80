"""slice_bytes: the bytes of some rows and columns of a stored matrix, without reading the rest of it."""

import numpy as np
import numpy.typing as npt

__all__ = ["slice_bytes"]


def slice_bytes(
    data: npt.NDArray[np.uint8], num_rows: int, rows: slice | npt.NDArray[np.int64], blocks: slice, block_bytes: int
) -> npt.NDArray[np.uint8]:
    """Of a matrix of `num_rows` rows, each of whole blocks of `block_bytes`, those blocks of those rows, row by row.

    A view of `data` (one-dimensional) where the bytes lie together, else a copy.
    """
    if isinstance(rows, slice) and rows == slice(0, num_rows) and blocks.start == 0 and blocks.stop is None:
        return data
    row_bytes = len(data) // num_rows
    stop = row_bytes if blocks.stop is None else blocks.stop * block_bytes
    part = data.reshape(num_rows, row_bytes)[rows, blocks.start * block_bytes : stop]
    return np.ascontiguousarray(part).reshape(-1)

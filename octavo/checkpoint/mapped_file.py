"""MappedFile: one model file, mapped into memory read-only.

Knows nothing of formats. Pages are read when they are touched, so that opening costs nothing per byte.
"""

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError

__all__ = ["MappedFile"]


class MappedFile:
    """A file's bytes as `buffer`, and slices of them as arrays that keep the mapping alive."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where the file is missing, unreadable or empty."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file.") from None
        except ValueError:
            raise CheckpointError(f"{path}: the file is empty. Was its download interrupted?") from None
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read: {error.strerror}.") from error
        self.num_bytes = len(self.buffer)

    def view(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A read-only, one-dimensional view; the caller has checked the bounds."""
        return np.frombuffer(self.buffer, dtype=np.uint8, count=num_bytes, offset=offset)

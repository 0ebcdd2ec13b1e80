"""Recorded computations of the cpu provider: the ops of a function of tensors, replayed by one native call.

Knows neither models nor steps: what is recorded is whatever ops the function calls while it runs once.
"""

import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels._cpu import Recording

__all__ = ["Arena", "Replay", "record"]

Pages = npt.NDArray[np.uint8]


class Arena:
    """Memory of recorded results, committed page by page as rows are first written: room for many costs nothing.

    Invariant: a buffer is given out again only when no tensor views it any more, so at replay as at recording a
    result is overwritten by ops that come after its last reader.
    """

    def __init__(self) -> None:
        self._free: list[Pages] = []
        self._all: list[Pages] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose memory stays where it is as long as the arena lives, and is reused once it has no views."""
        num_bytes = math.prod(shape) * dtype.itemsize
        pages = self._take(num_bytes)
        held = pages[:num_bytes]  # by the tensor's storage, and by nothing else
        weakref.finalize(held, self._free.append, pages).atexit = False
        return torch.from_numpy(held).view(dtype).view(shape)

    def _take(self, num_bytes: int) -> Pages:
        """The smallest free buffer that is large enough, or a new one."""
        large_enough = [i for i, pages in enumerate(self._free) if len(pages) >= num_bytes]
        if large_enough:
            return self._free.pop(min(large_enough, key=lambda i: len(self._free[i])))
        pages = np.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=np.uint8)
        self._all.append(pages)
        return pages


class _ResultsIn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has ops allocate their results in an arena. Anything that torch would compute could not be replayed."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arena = arena

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        if func is torch.ops.aten.empty.memory_format:
            return self.arena.empty(tuple(args[0]), kwargs["dtype"])
        if func is torch.ops.aten.empty_like.default:
            return self.arena.empty(tuple(args[0].shape), args[0].dtype)
        raise RuntimeError(f"{func} is torch's and can't be recorded: a captured step consists of native ops and views")


class Replay:
    """A recorded computation. `result` has as many rows as were recorded for."""

    def __init__(self, recording: Recording, result: torch.Tensor, arena: Arena) -> None:
        self.result = result
        self._recording = recording
        self._arena = arena  # the recording has its addresses

    def __len__(self) -> int:
        """Its ops."""
        return len(self._recording)

    def __call__(self, num_rows: int, num_requests: int) -> torch.Tensor:
        """Compute the first rows of `result`, and return them. They are overwritten by later replays in the arena.

        Raises IndexError for an index that leads outside its tensor.
        """
        self._recording.replay(num_rows, num_requests)
        return self.result[:num_rows]


def record(compute: Callable[[], torch.Tensor], num_rows: int, num_requests: int, arena: Arena) -> Replay:
    """Call `compute` once, recording the native ops it calls instead of running them.

    Its inputs are tensors of `num_rows` rows, or of one row for each of `num_requests` requests, whose memory later
    holds the inputs of each replay. Raises RuntimeError for a computation that is torch's own.
    """
    recording = Recording(num_rows, num_requests)
    recording.begin()
    try:
        with _ResultsIn(arena):
            result = compute()
    finally:
        recording.end()
    return Replay(recording, result, arena)

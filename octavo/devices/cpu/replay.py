"""Recorded computations of the cpu device: the ops of a function of tensors, replayed by one native call.

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
from torch.overrides import TorchFunctionMode

from octavo.devices.cpu import _cpu

__all__ = ["Arena", "Replay", "record", "run_replays"]

Pages = npt.NDArray[np.uint8]
FACTS = frozenset(["__get__", "data_ptr", "dim", "is_contiguous", "numel", "size", "stride"])
VIEWS = frozenset(["__getitem__", "chunk", "contiguous", "flatten", "narrow", "reshape", "select", "split", "unbind"])
VIEWS |= {"expand", "permute", "squeeze", "transpose", "unflatten", "unsqueeze", "view"}
"""Of these what copies is refused all the same."""


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


class _ResultsIn(TorchFunctionMode):
    """Has ops allocate their results in an arena. Anything that torch would compute could not be replayed."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            return self.arena.empty(args[0], kwargs["dtype"])
        if func is torch.empty_like:
            return self.arena.empty(tuple(args[0].shape), args[0].dtype)
        if func.__name__ in FACTS:
            return func(*args, **kwargs)
        if func.__name__ in VIEWS:
            views = func(*args, **kwargs)
            if all(_address(view) == _address(args[0]) for view in _tensors(views)):
                return views
        raise RuntimeError(f"{func.__name__} is torch's and can't be recorded: a captured step is native ops and views")


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Replay:
    """A recorded computation. `result` has as many rows as were recorded for."""

    def __init__(self, recording: _cpu.Recording, result: torch.Tensor, arena: Arena) -> None:
        self.result = result
        self.recording = recording
        self._arena = arena  # the recording has its addresses

    def __len__(self) -> int:
        """Its ops."""
        return len(self.recording)

    def run(self, num_rows: int, num_requests: int) -> None:
        """Compute the first rows of `result`, which hold until the next replay in the arena.

        Raises IndexError for an index that leads outside its tensor.
        """
        run_replays([(self.recording, num_rows, num_requests)])


def run_replays(runs: list[tuple[_cpu.Recording, int, int]]) -> None:
    """`Replay.run` of each recording, with these arguments, in one native call: what is behind it is between steps,
    where nothing is in the caches."""
    _cpu.replay(runs)


def record(compute: Callable[[], torch.Tensor], num_rows: int, num_requests: int, arena: Arena) -> Replay:
    """Call `compute` once, recording the native ops it calls instead of running them.

    Its inputs are tensors of `num_rows` rows, or of one row for each of `num_requests` requests, whose memory later
    holds the inputs of each replay. Raises RuntimeError for a computation that is torch's own.
    """
    recording = _cpu.Recording(num_rows, num_requests)
    recording.begin()
    try:
        with _ResultsIn(arena):
            result = compute()
    finally:
        recording.end()
    return Replay(recording, result, arena)

"""resolve_ops: the ops provider by name. progress_counter: whether it gets on. read_timer: how fast it reads."""

import importlib.util
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

from octavo.kernels.ops import Ops

__all__ = ["ProviderName", "progress_counter", "read_timer", "resolve_ops"]

ProviderName = Literal["auto", "cpu", "reference"]


def resolve_ops(name: ProviderName) -> Ops:
    """The provider called `name`; "auto": the native CPU kernels, or where they aren't built the reference with a
    warning.
    """
    if name == "reference":
        return Ops()
    if name == "auto" and importlib.util.find_spec("octavo.devices.cpu._cpu") is None:
        warnings.warn(
            "The native kernels are not built, so plain torch computes, many times slower. `make setup` builds them.",
            stacklevel=2,
        )
        return Ops()
    from octavo.devices.cpu.ops import CpuOps

    return CpuOps()


def progress_counter(name: str) -> Callable[[], int]:
    """A function that any thread may call while ops compute: its value changes as long as they get on."""
    if name == "cpu":
        from octavo.devices.cpu._cpu import progress

        return progress
    return lambda: int(time.process_time())  # torch counts nothing, but where it computes it takes CPU time


def read_timer(name: str) -> Callable[[Sequence[tuple[int, int]]], float] | None:
    """A function that reads buffers (address, bytes) once, on the threads that ops compute on, and returns the seconds;
    None of torch, which has none."""
    if name == "cpu":
        from octavo.devices.cpu._cpu import time_read

        return time_read
    return None

"""Pulse: whether the engine gets on, written by a thread of its process and read by the API process.

Two times in a file that both have mapped, on the clock of `time.monotonic`, which all processes of a host share. Knows
nothing of what progress is.
"""

import mmap
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["PULSE_S", "SILENT_S", "STALLED_S", "Pulse", "start_beating"]

PULSE_S = 0.5
SILENT_S = 3.0
"""Without a sign of life for this long the process is stopped, swapped out or gone."""
STALLED_S = 30.0
"""Busy for this long without getting on: longer than any unit of an op, or the Python between two ops, takes."""
FILE_NAME = "pulse"
_TIMES = struct.Struct("=dd")


class Pulse:
    """The file's two times: of the last beat, and of the last one at which there had been progress."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / FILE_NAME
        path.touch(0o600)
        with path.open("r+b") as file:
            file.truncate(_TIMES.size)
            self._memory = mmap.mmap(file.fileno(), _TIMES.size)

    def beat(self, has_progressed: bool) -> None:
        """The engine's process: it is alive, and since the last beat got on or had nothing to do."""
        now = time.monotonic()
        _, progressed_at = _TIMES.unpack(self._memory)
        _TIMES.pack_into(self._memory, 0, now, now if has_progressed else progressed_at)

    def trouble(self) -> str | None:
        """The API process: what is wrong with the engine, or None."""
        now = time.monotonic()
        alive_at, progressed_at = _TIMES.unpack(self._memory)
        if now - alive_at > SILENT_S:
            return f"the engine has given no sign of life for {now - alive_at:.1f} s"
        if now - progressed_at > STALLED_S:
            return f"the engine has work and makes no progress for {now - progressed_at:.1f} s"
        return None


def start_beating(pulse: Pulse, progress: Callable[[], object], is_idle: Callable[[], bool]) -> None:
    """Beat, and start the thread that goes on until the process ends. `progress` gives a value that changes while work
    is done."""
    pulse.beat(has_progressed=True)

    def beat_on() -> None:
        last = progress()
        while True:
            time.sleep(PULSE_S)
            current = progress()
            pulse.beat(current != last or is_idle())
            last = current

    threading.Thread(target=beat_on, name="pulse", daemon=True).start()

"""Output: standard output and standard error of a server, whose readers can neither stop nor end it.

A reader may be slow (a full pipe), gone (`octavo serve M | head -1`), or never there. Knows text, not what it says.
"""

import atexit
import io
import os
import sys
import threading
from collections import deque
from contextlib import suppress

__all__ = ["Output", "never_wait_for_readers", "open_standard_files"]

MAX_KEPT_BYTES = 1 << 20
"""Text that waits for its reader; more is dropped, and counted."""
LAST_WORDS_S = 1.0
"""How long the end of a process waits for what was written before."""


class Output(io.TextIOBase):
    """A stream that a thread of its own writes to a file. Text that the encoding lacks is escaped.

    Invariant: `_num_bytes` is the size of what is in `_texts`, or being written; it stays below MAX_KEPT_BYTES, but for
    the last text.
    """

    def __init__(self, file: int, encoding: str = "utf-8") -> None:
        self._file = file
        self._encoding = encoding
        self._texts: deque[bytes] = deque()
        self._num_bytes = self._num_dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._write_on, name=f"output-{file}", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def fileno(self) -> int:
        return self._file

    def write(self, text: str) -> int:
        data = text.encode(self._encoding, "backslashreplace")
        with self._changed:
            if self._num_bytes >= MAX_KEPT_BYTES:
                self._num_dropped += 1
                return len(text)
            if self._num_dropped:
                data = b"octavo: %d pieces of the log were dropped: nobody read it.\n" % self._num_dropped + data
                self._num_dropped = 0
            if data:
                self._texts.append(data)
                self._num_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is written, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes, timeout_s)

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                data = self._texts.popleft()
            _write_all(self._file, data)
            with self._changed:
                self._num_bytes -= len(data)
                self._changed.notify_all()


def _write_all(file: int, data: bytes) -> None:
    with suppress(OSError):  # the reader is gone, or the disk is full: nothing can be said about it
        while data:
            data = data[os.write(file, data) :]


def open_standard_files() -> None:
    """Give a process that was started without some of its standard files empty ones, before other files get their
    numbers. Call it first of all."""
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free


def never_wait_for_readers() -> None:
    """Replace `sys.stdout` and `sys.stderr`, by one stream if they are the same file: lines then stay in order."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.flush()
    encoding = getattr(sys.stdout or sys.stderr, "encoding", None) or "utf-8"
    sys.stdout = sys.stderr = Output(1, encoding)
    if not os.path.sameopenfile(1, 2):
        sys.stderr = Output(2, encoding)
    for output in {sys.stdout, sys.stderr}:
        atexit.register(output.drain, LAST_WORDS_S)

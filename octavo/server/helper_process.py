"""HelperProcess: a process beside the server for work that could stop it. Asked one question after the other.

A helper reads questions from its standard input and writes answers to its standard output, each with its length before
it. It is started for the first question, and anew after it died: of its own alarm, of too little memory, or because the
asker went away.
"""

import asyncio
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "STACK_BYTES",
    "HelperDied",
    "HelperProcess",
    "be_helper",
    "limit_seconds",
    "questions",
    "resident_bytes",
    "run_helper",
    "send_answer",
]

STACK_BYTES = 64 << 20
"""A quarter of what the engine's threads have: what compiles here compiles there."""
_LENGTH = struct.Struct("<Q")


class HelperDied(Exception):
    """No answer: the helper ended with `status`, as `subprocess` gives it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the helper process ended with status {status}")
        self.status = status


class HelperProcess:
    """Invariant: a running process has answered all it was asked, except while `_asking` is held."""

    def __init__(self, module: str, start: bytes) -> None:
        """`module` runs with `python -m`; `start` is the first thing it reads, and not answered."""
        self._module = module
        self._start = start
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()

    async def ask(self, question: bytes) -> bytes:
        """The answer. Raises HelperDied. Cancelling the wait for it ends the process."""
        async with self._asking:
            while True:
                process, self._process = self._process, None  # unless it answers
                if process is None or process.returncode is not None:
                    process = await self._start_process()
                try:
                    answer = await _exchange(process, question)
                except (asyncio.IncompleteReadError, ConnectionError):
                    if status := await process.wait():
                        raise HelperDied(status) from None
                    continue  # it had done its part and was about to end
                except BaseException:
                    process.kill()  # its answer would be taken for the next one's
                    raise
                self._process = process
                return answer

    def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _start_process(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        # In a session of its own the terminal's Ctrl-C does not reach it.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(_LENGTH.pack(len(self._start)))
        process.stdin.write(self._start)
        return process


async def _exchange(process: asyncio.subprocess.Process, question: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(question)))
    process.stdin.write(question)
    await process.stdin.drain()
    (num_bytes,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return await process.stdout.readexactly(num_bytes)


# ---- the other process


def run_helper(serve: Callable[[], None], max_memory_bytes: int) -> None:
    """Run `serve` in a thread with a deep stack and no more memory than this, until it returns."""
    be_helper(max_memory_bytes)
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=serve)
    worker.start()
    worker.join()


def be_helper(max_memory_bytes: int) -> None:
    """Leave signals to the parent, and take no more memory than this."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to answer
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = max_memory_bytes if most == resource.RLIM_INFINITY else min(max_memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def resident_bytes() -> int:
    """Memory that this process has now; without /proc, the most it had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def questions() -> Iterator[bytes]:
    """What is asked, beginning with the start; ends when the parent is gone."""
    while head := sys.stdin.buffer.read(_LENGTH.size):
        yield _read(sys.stdin.buffer, *_LENGTH.unpack(head))


def _read(stream: BinaryIO, num_bytes: int) -> bytes:
    text = stream.read(num_bytes)
    if len(text) < num_bytes:
        os._exit(0)  # the parent is gone
    return text


def send_answer(answer: bytes) -> None:
    sys.stdout.buffer.write(_LENGTH.pack(len(answer)))
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


def limit_seconds(seconds: float) -> None:
    """End the process by SIGPROF once it has computed for so long; 0 ends the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)

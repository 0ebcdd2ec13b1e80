"""GrammarChecker: whether structured output compiles, before a request is queued.

What a client sends may take a compiler minutes, gigabytes or more stack than there is. So it is compiled in a process
of its own, which runs `python -m octavo.server.grammar_check`: started for the first request that needs it, ended by
its own alarm when a grammar takes too long, and started anew for the next one.
"""

import asyncio
import pickle
import resource
import signal
import struct
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from octavo.errors import InvalidRequestError
from octavo.options import EngineConfig
from octavo.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from octavo.text.grammar import GrammarCompiler

__all__ = ["GrammarChecker"]

TIME_LIMIT_S = 3.0
MEMORY_LIMIT_BYTES = 4 << 30
MAX_MATCHER_BYTES = 64 << 20
"""What the engine would hold for each request."""
STACK_BYTES = 64 << 20
"""A quarter of what the engine's threads have: what compiles here compiles there."""
NUM_REMEMBERED = 256
"""Clients ask for the same few grammars again and again."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class _Start:
    config: EngineConfig
    vocab_size: int
    eos_token_ids: list[int]


class GrammarChecker:
    """Invariant: a running process has answered all it was asked, except while `_asking` is held."""

    def __init__(self, config: EngineConfig, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._start = _Start(config, vocab_size, eos_token_ids)
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self._answers: OrderedDict[StructuredOutputs, str] = OrderedDict()  # least recently used first

    async def problem(self, structure: StructuredOutputs) -> str:
        """What the compiler has to say against it; "" if nothing."""
        if structure not in self._answers:
            async with self._asking:
                if structure not in self._answers:
                    return await self._ask(structure)
        self._answers.move_to_end(structure)
        return self._answers[structure]

    def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _ask(self, structure: StructuredOutputs) -> str:
        process, self._process = self._process, None  # unless it answers
        if process is None or process.returncode is not None:
            process = await self._start_process()
        try:
            answer = await _exchange(process, msgspec.msgpack.encode(structure))
        except (asyncio.IncompleteReadError, ConnectionError):
            return _last_words(await process.wait())
        except BaseException:
            process.kill()  # its answer would be taken for the next one's
            raise
        self._process = process
        self._answers[structure] = answer
        if len(self._answers) > NUM_REMEMBERED:
            self._answers.popitem(last=False)
        return answer

    async def _start_process(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        # In a session of its own the terminal's Ctrl-C does not reach it.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert process.stdin is not None
        message = pickle.dumps(self._start)  # paths may hold bytes that are no text
        process.stdin.write(_LENGTH.pack(len(message)) + message)
        return process


async def _exchange(process: asyncio.subprocess.Process, message: bytes) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(message)) + message)
    await process.stdin.drain()
    (num_bytes,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return (await process.stdout.readexactly(num_bytes)).decode()


def _last_words(status: int) -> str:
    if status == -signal.SIGALRM:
        return f"The structured output can't be compiled: it takes longer than {TIME_LIMIT_S:g} s. Make it simpler."
    return "The structured output can't be compiled: it takes too much memory or nests too deeply. Make it simpler."


# ---- the other process


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    start: _Start = pickle.loads(_read(requests))
    decoder = msgspec.msgpack.Decoder(StructuredOutputs)
    compiler: GrammarCompiler | None = None
    while message := _read(requests):
        problem = b""
        try:
            compiler = compiler or _load_compiler(start)
            signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
            _try(compiler, decoder.decode(message))
        except InvalidRequestError as error:
            problem = error.message.encode(errors="replace")
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(_LENGTH.pack(len(problem)) + problem)
        answers.flush()


def _load_compiler(start: _Start) -> "GrammarCompiler":
    from octavo.text.grammar import GrammarCompiler
    from octavo.text.text_side import load_model_tokenizer

    return GrammarCompiler(load_model_tokenizer(start.config), start.vocab_size, start.eos_token_ids)


def _try(compiler: "GrammarCompiler", structure: StructuredOutputs) -> None:
    before = _resident_bytes()
    matcher = compiler.compile(structure)
    num_bytes = _resident_bytes() - before
    del matcher
    if num_bytes > MAX_MATCHER_BYTES:
        raise InvalidRequestError(
            f"The structured output takes {num_bytes >> 20} MB to follow; at most {MAX_MATCHER_BYTES >> 20} MB are "
            "given to a request. Make it simpler."
        )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _read(stream: BinaryIO) -> bytes:
    """One message; b"" when the parent is gone."""
    head = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to answer
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    worker.start()
    worker.join()


if __name__ == "__main__":
    main()

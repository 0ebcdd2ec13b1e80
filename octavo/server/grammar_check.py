"""GrammarChecker: whether structured output compiles, before a request is queued.

What a client sends may take a compiler minutes, gigabytes or more stack than there is. So each grammar is compiled in a
process of its own, forked from one that has the tokenizer loaded, which runs `python -m octavo.server.grammar_check`.
Most compile at once. One that takes longer is tried again behind others of its kind, so that it delays none but these.
"""

import asyncio
import os
import pickle
import signal
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from octavo.errors import EngineBusyError, InvalidRequestError
from octavo.options import EngineConfig
from octavo.sampling_params import StructuredOutputs
from octavo.server.helper_process import (
    STACK_BYTES,
    HelperDied,
    HelperProcess,
    be_helper,
    questions,
    resident_bytes,
    send_answer,
)

if TYPE_CHECKING:
    from octavo.text.grammar import GrammarCompiler

__all__ = ["GrammarChecker"]

QUICK_S, TIME_LIMIT_S = 0.25, 3.0
"""What a grammar may take at first, and in the end."""
MAX_WAITING, MAX_SLOW_WAITING = 64, 8
"""Grammars that wait to be tried, and to be tried again. More are refused: the next would wait half a minute."""
MEMORY_LIMIT_BYTES = 4 << 30
MAX_MATCHER_BYTES = 64 << 20
"""What the engine would hold for each request."""
NUM_REMEMBERED = 256
"""Clients ask for the same few grammars again and again."""


@dataclass(frozen=True, slots=True)
class _Start:
    config: EngineConfig
    vocab_size: int
    eos_token_ids: list[int]
    limit_s: float


class _Lane:
    """Grammars that are tried one after the other, each for up to `limit_s`."""

    def __init__(self, start: _Start, max_waiting: int) -> None:
        self.limit_s = start.limit_s
        self._helper = HelperProcess(__name__, pickle.dumps(start))  # paths may hold bytes that are no text
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def try_out(self, structure: StructuredOutputs) -> str | None:
        """What is wrong with it, or ""; None when it takes too long. Raises EngineBusyError."""
        if self._num_waiting == self._max_waiting:
            raise EngineBusyError(
                f"{self._max_waiting} structured outputs wait already to be checked, as many as may.",
                self._max_waiting * self.limit_s / 2,
                "structured_outputs",
            )
        self._num_waiting += 1
        try:
            question = msgspec.msgpack.encode(structure)
            try:
                answer = await self._helper.ask(question)
            except HelperDied:  # not of a grammar: somebody ended it
                answer = await self._helper.ask(question)
        finally:
            self._num_waiting -= 1
        return msgspec.msgpack.decode(answer, type=str | None)

    def close(self) -> None:
        self._helper.close()


class GrammarChecker:
    """Invariant: a grammar is in `_tries` while it is tried, however many requests wait for that, and afterwards in
    `_answers`, whatever became of it."""

    def __init__(self, config: EngineConfig, vocab_size: int, eos_token_ids: list[int]) -> None:
        def start(limit_s: float) -> _Start:
            return _Start(config, vocab_size, eos_token_ids, limit_s)

        self._quick = _Lane(start(QUICK_S), MAX_WAITING)
        self._slow = _Lane(start(TIME_LIMIT_S), MAX_SLOW_WAITING)
        self._answers: OrderedDict[StructuredOutputs, str] = OrderedDict()  # least recently used first
        self._tries: dict[StructuredOutputs, asyncio.Task[str]] = {}

    async def problem(self, structure: StructuredOutputs) -> str:
        """What the compiler has to say against it; "" if nothing. Raises EngineBusyError."""
        if structure in self._answers:
            self._answers.move_to_end(structure)
            return self._answers[structure]
        task = self._tries.get(structure)
        if task is None:
            task = self._tries[structure] = asyncio.create_task(self._try_out(structure))
        return await asyncio.shield(task)  # one that leaves takes nothing from those who wait for the same

    def close(self) -> None:
        self._quick.close()
        self._slow.close()

    async def _try_out(self, structure: StructuredOutputs) -> str:
        try:
            answer = await self._quick.try_out(structure)
            if answer is None:
                answer = await self._slow.try_out(structure)
        finally:
            del self._tries[structure]
        self._answers[structure] = answer = TOO_SLOW if answer is None else answer
        if len(self._answers) > NUM_REMEMBERED:
            self._answers.popitem(last=False)
        return answer


TOO_SLOW = f"The structured output can't be compiled: it takes longer than {TIME_LIMIT_S:g} s. Make it simpler."
TOO_LARGE = "The structured output can't be compiled: it takes too much memory or nests too deeply. Make it simpler."


# ---- the other process


def _answer(compiler: "GrammarCompiler", question: bytes, limit_s: float) -> bytes:
    """Let a child compile it, which may die of that."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        threading.stack_size(STACK_BYTES)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        worker = threading.Thread(target=_try_out, args=(compiler, question, writing))
        worker.start()
        worker.join()
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer and os.waitstatus_to_exitcode(status) == 0:
        return answer
    is_slow = os.waitstatus_to_exitcode(status) == -signal.SIGALRM
    return msgspec.msgpack.encode(None if is_slow else TOO_LARGE)


def _try_out(compiler: "GrammarCompiler", question: bytes, writing: int) -> None:
    problem = ""
    try:
        before = resident_bytes()
        matcher = compiler.compile(msgspec.msgpack.decode(question, type=StructuredOutputs))
        num_bytes = resident_bytes() - before
        del matcher
        if num_bytes > MAX_MATCHER_BYTES:
            problem = (
                f"The structured output takes {num_bytes >> 20} MB to follow; at most {MAX_MATCHER_BYTES >> 20} MB are "
                "given to a request. Make it simpler."
            )
    except InvalidRequestError as error:
        problem = error.message.encode(errors="replace").decode()
    except BaseException:
        os._exit(1)
    os.write(writing, msgspec.msgpack.encode(problem[:MAX_PROBLEM]))


MAX_PROBLEM = 4000
"""Characters of a compiler's message: a pipe takes them without a reader."""


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork takes no threads along
    be_helper(MEMORY_LIMIT_BYTES)
    from octavo.text.grammar import GrammarCompiler
    from octavo.text.text_side import load_model_tokenizer

    asked = questions()
    start: _Start = pickle.loads(next(asked))
    compiler = GrammarCompiler(load_model_tokenizer(start.config), start.vocab_size, start.eos_token_ids)
    for question in asked:
        send_answer(_answer(compiler, question, start.limit_s))


if __name__ == "__main__":
    main()

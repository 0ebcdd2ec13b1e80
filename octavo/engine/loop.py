"""The engine's process: takes requests from a socket, steps the engine, sends the deltas back.

Run as `python -m octavo.engine.loop` by `api/engine_process.py`. Knows no text and no HTTP. Imports torch only once it
watches its parent.
"""

import gc
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from octavo.api.engine_process import read_launch
from octavo.core.scheduler_stats import SchedulerStats
from octavo.core.step import RequestDelta
from octavo.errors import InvalidRequestError, OctavoError
from octavo.ipc.messages import (
    AbortRequests,
    AddPooling,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineReady,
    FinishRequest,
    FromEngine,
    StepResult,
    ToEngine,
)
from octavo.ipc.pulse import Pulse, start_beating
from octavo.ipc.sockets import has_message
from octavo.options import EngineConfig

__all__ = ["BuildEngine", "Channel", "Engine", "EngineLoop", "SocketChannel", "main"]

MAX_UNREAD_RESULTS = 1000
"""Results the API process may leave unread before the engine merges them instead of sending more."""
LAST_WORDS_MS = 2000
STATS_S = 0.1
"""How old the counters that the API process has may become while steps are computed."""


class Engine(Protocol):
    """What the loop needs of an `LLMEngine`."""

    def add_request(self, request: AddRequest) -> None: ...
    def add_pooling(self, request: AddPooling) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def finish(self, request_id: int, num_tokens: int) -> None: ...
    def step(self) -> list[RequestDelta]: ...
    def take_started(self) -> list[int]: ...
    def stats(self) -> SchedulerStats: ...
    def progress(self) -> int: ...
    @property
    def has_unfinished_requests(self) -> bool: ...
    @property
    def memory_roof_share(self) -> float | None: ...


BuildEngine = Callable[[EngineConfig], tuple[Engine, EngineInfo]]


class Channel(Protocol):
    """The engine's end of the way to the API process."""

    def wait(self, until_writable: bool) -> None:
        """Sleep until a message arrives, or there is room to send when `until_writable`."""
        ...

    def receive(self) -> list[ToEngine]:
        """Every message that has arrived."""
        ...

    def send(self, message: FromEngine) -> bool:
        """Send, or return False at once because the API process is behind with its reading."""
        ...


class SocketChannel:
    """A Channel over ZeroMQ."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(MAX_UNREAD_RESULTS)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def wait(self, until_writable: bool) -> None:
        self._socket.poll(None, zmq.POLLIN | (zmq.POLLOUT if until_writable else 0))

    def receive(self) -> list[ToEngine]:
        messages = []
        while has_message(self._socket):
            messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        return messages

    def send(self, message: FromEngine) -> bool:
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, grace_ms: int = LAST_WORDS_MS) -> None:
        """Deliver what was sent, if the API process reads it within the time."""
        self._socket.close(grace_ms)
        self._context.term()


class EngineLoop:
    """Turns of: take what has arrived, compute a step, report it.

    Invariant: `_unsent` holds, in order, the deltas that the API process had no room for, and `_started` the requests
    that were first scheduled meanwhile; they go with the next report. Counters go with a report if requests have begun
    or ended, if nothing is left to do, or if none went for STATS_S: decode steps are too short to count each.
    """

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._unsent: list[RequestDelta] = []
        self._started: dict[int, float] = {}
        self._stats_at = -math.inf  # when counters went last
        self._num_turns = 0
        self._is_idle = False

    def progress(self) -> tuple[int, int]:
        """Changes while work is done; for a watcher in another thread."""
        return self._num_turns, self._engine.progress()

    def is_idle(self) -> bool:
        return self._is_idle

    def run(self) -> None:
        self._report()
        while True:
            self.turn()

    def turn(self) -> None:
        if not self._engine.has_unfinished_requests:
            self._is_idle = True
            self._channel.wait(until_writable=bool(self._unsent))
            self._is_idle = False
        for message in self._channel.receive():
            self._take(message)
        if self._engine.has_unfinished_requests:
            now = time.monotonic()  # a step is scheduled before it is waited for
            self._unsent += self._engine.step()
            self._started |= dict.fromkeys(self._engine.take_started(), now)
        self._report()
        self._num_turns += 1

    def _take(self, message: ToEngine) -> None:
        match message:
            case AddRequest() | AddPooling():
                try:
                    self._add(message)
                except InvalidRequestError as error:
                    num_choices = message.sampling_params.n if isinstance(message, AddRequest) else 1
                    for request_id in range(message.request_id, message.request_id + num_choices):
                        self._unsent.append(RequestDelta(request_id, [], finish_reason="error", error=str(error)))
            case AbortRequests():
                for request_id in message.request_ids:
                    self._engine.abort(request_id)
            case FinishRequest():
                self._engine.finish(message.request_id, message.num_tokens)

    def _add(self, request: AddRequest | AddPooling) -> None:
        if isinstance(request, AddPooling):
            self._engine.add_pooling(request)
        else:
            self._engine.add_request(request)

    def _report(self) -> None:
        engine, now = self._engine, time.monotonic()
        has_news = self._started or not engine.has_unfinished_requests or any(d.finish_reason for d in self._unsent)
        if has_news or now >= self._stats_at + STATS_S:
            result = StepResult(self._unsent, engine.stats(), self._started, engine.memory_roof_share)
        elif self._unsent:
            result = StepResult(self._unsent)
        else:
            return
        if self._channel.send(result):
            self._unsent, self._started = [], {}
            self._stats_at = self._stats_at if result.stats is None else now


def _end_with_parent(folder: str) -> None:
    """Wait for the end of standard input: only the parent's death or its wish closes it."""
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _failure(error: Exception) -> EngineFailed:
    if not isinstance(error, OctavoError):
        traceback.print_exc()
    return EngineFailed(type(error).__name__, str(error) or repr(error))


def _build_engine(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    start = time.perf_counter()
    from octavo.engine.start_log import build_logged_engine

    imports_seconds = time.perf_counter() - start
    engine, info = build_logged_engine(config)
    return engine, msgspec.structs.replace(info, start_seconds={"imports": imports_seconds, **info.start_seconds})


def main(build: BuildEngine | None = None) -> int:
    """Serve until the parent is gone; returns the exit status of an engine that failed."""
    # The terminal's Ctrl-C, and a SIGTERM to the whole group, are the parent's to answer: it drains first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    launch = read_launch(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, args=(launch.folder,), name="parent-watch", daemon=True).start()
    process_seconds = time.time() - launch.started_at
    channel = SocketChannel(launch.address)
    try:
        engine, info = (build or _build_engine)(launch.config)
        seconds = {"process": process_seconds, **info.start_seconds}
        loop = EngineLoop(engine, channel)
        start_beating(Pulse(launch.folder), loop.progress, loop.is_idle)  # who hears of it next finds it alive
        channel.send(EngineReady(msgspec.structs.replace(info, start_seconds=seconds)))
        gc.freeze()  # what the start made stays: no collection walks over it in the middle of a step
        loop.run()
    except Exception as error:
        channel.send(_failure(error))
    channel.close()
    return 1


if __name__ == "__main__":
    sys.exit(main())

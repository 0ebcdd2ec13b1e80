"""EngineLoop: takes requests from a channel, steps the engine, sends the deltas back. Knows no text and no HTTP."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from msgspec import structs

from octavo.core.scheduler_stats import SchedulerStats
from octavo.core.step import Fault, RequestDelta
from octavo.errors import InvalidRequestError
from octavo.ipc.messages import (
    AbortRequests,
    AddPooling,
    AddRequest,
    FinishRequest,
    FromEngine,
    StepResult,
    ToEngine,
)
from octavo.sampling_params import SamplingParams

T = TypeVar("T", AddRequest, AddPooling)

__all__ = ["Channel", "Engine", "EngineLoop"]

TAKE_S = 0.05
"""How long messages are taken between two steps; the rest waits for the next turn."""
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


class Channel(Protocol):
    """The engine's end of the way to the API process."""

    def wait(self) -> None:
        """Sleep until a message arrives."""
        ...

    def receive(self) -> Iterator[ToEngine]:
        """The messages that have arrived, each as it is asked for."""
        ...

    def send(self, message: FromEngine) -> None:
        """Send without waiting for the API process to read."""
        ...


class EngineLoop:
    """Turns of: take what has arrived, compute a step, report it.

    Counters go with a report if requests have begun or ended, if nothing is left to do, or if none went for STATS_S:
    decode steps are too short to count each.
    """

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._stats_at = -math.inf  # when counters went last
        self._num_turns = 0
        self._is_idle = False
        self._params = SamplingParams()  # the latest request's

    def progress(self) -> tuple[int, int]:
        """Changes while work is done; for a watcher in another thread."""
        return self._num_turns, self._engine.progress()

    def is_idle(self) -> bool:
        return self._is_idle

    def run(self) -> None:
        self._report([], {})
        while True:
            self.turn()

    def turn(self) -> None:
        if not self._engine.has_unfinished_requests:
            self._is_idle = True
            self._channel.wait()
            self._is_idle = False
        deltas: list[RequestDelta] = []
        started: dict[int, float] = {}
        taken_until = time.monotonic() + TAKE_S
        for message in self._channel.receive():
            self._take(message, deltas)
            if time.monotonic() > taken_until:
                break
        if self._engine.has_unfinished_requests:
            now = time.monotonic()  # a step is scheduled before it is waited for
            deltas += self._engine.step()
            started = dict.fromkeys(self._engine.take_started(), now)
        self._report(deltas, started)
        self._num_turns += 1

    def _take(self, message: ToEngine, deltas: list[RequestDelta]) -> None:
        """Those that the engine refuses end with a delta."""
        match message:
            case AddRequest():
                self._params = params = message.sampling_params or self._params
                whole = structs.replace(message, sampling_params=params)
                deltas += _refused(self._engine.add_request, whole, params.n)
            case AddPooling():
                deltas += _refused(self._engine.add_pooling, message, 1)
            case AbortRequests():
                for request_id in message.request_ids:
                    self._engine.abort(request_id)
            case FinishRequest():
                self._engine.finish(message.request_id, message.num_tokens)

    def _report(self, deltas: list[RequestDelta], started: dict[int, float]) -> None:
        engine, now = self._engine, time.monotonic()
        has_news = started or not engine.has_unfinished_requests or any(d.finish_reason for d in deltas)
        if has_news or now >= self._stats_at + STATS_S:
            self._stats_at = now
            self._channel.send(StepResult(deltas, engine.stats(), started, engine.memory_roof_share))
        elif deltas:
            self._channel.send(StepResult(deltas))


def _refused(add: Callable[[T], None], request: T, num_choices: int) -> list[RequestDelta]:
    """Add a request. Returns the ends of its choices if the engine refuses it."""
    try:
        add(request)
    except InvalidRequestError as error:
        request_ids = range(request.request_id, request.request_id + num_choices)
        message, fault = error.message, Fault(error.param, error.code)
        return [RequestDelta(i, [], finish_reason="error", error=message, fault=fault) for i in request_ids]
    return []

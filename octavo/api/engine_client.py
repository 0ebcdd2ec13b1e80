"""EngineClient: the API process's way to the engine. Sends requests, hands out what comes back, notices its death.

Knows token ids only. Everything here runs in one event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from types import TracebackType

import msgspec
import zmq

from octavo.api.admission import Admission
from octavo.api.engine_process import EngineProcess
from octavo.api.metrics import EngineMetrics, RequestTimer
from octavo.core.step import RequestDelta
from octavo.errors import (
    CheckpointError,
    ConfigError,
    EngineBusyError,
    EngineDeadError,
    OctavoError,
    RequestTimeoutError,
    UnknownArchitectureError,
)
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
from octavo.ipc.sockets import has_message
from octavo.sampling_params import SamplingParams

__all__ = ["EngineClient", "Generation"]

START_ERRORS: dict[str, type[OctavoError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, UnknownArchitectureError)
}


MAX_TAKEN = 64
"""Messages that are taken in one turn of the event loop."""


class Generation:
    """Engine requests followed together, one for each prompt and choice: iterating gives what each wake-up brings.

    Ids count up from `first_request_id`, a prompt's choices side by side. Iteration ends when every request has ended,
    and raises EngineDeadError when the engine is gone. Use it as a context manager: leaving aborts what still runs.

    Invariant: a request is in `open_requests` until its last delta has arrived, or it was finished or aborted here;
    later deltas are dropped.
    """

    def __init__(self, client: "EngineClient", first_request_id: int, num_requests: int) -> None:
        self.first_request_id = first_request_id
        self._client = client
        self.open_requests = {
            request_id: RequestTimer(client.metrics)
            for request_id in range(first_request_id, first_request_id + num_requests)
        }
        self._arrived: list[RequestDelta] = []
        self._error: OctavoError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Generation":
        timeout_s = self._client.request_timeout_s
        if timeout_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._time_out, timeout_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.abort()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[RequestDelta]:
        """All deltas since the last call: one step's, or several's for a slow reader."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self.open_requests:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived

    def abort(self) -> None:
        """End every request that still runs; the iteration ends too."""
        if self.open_requests:
            self._client.send(AbortRequests(list(self.open_requests)))
            self._close(list(self.open_requests))

    def _time_out(self, timeout_s: float) -> None:
        if self.open_requests:
            self._error = RequestTimeoutError(
                f"The request was not finished after {timeout_s:g} s. --request-timeout sets the limit."
            )
            self.abort()

    def finish(self, request_id: int, num_tokens: int) -> None:
        """A stop string was completed by the request's `num_tokens`-th token."""
        if request_id in self.open_requests:
            self._client.send(FinishRequest(request_id, num_tokens))
            self.open_requests[request_id].finished()
            self._close([request_id])

    def receive(self, delta: RequestDelta, now: float) -> None:
        """Called by the client."""
        timer = self.open_requests[delta.request_id]
        timer.tokens(len(delta.new_token_ids), now)
        self._arrived.append(delta)
        if delta.finish_reason is not None:
            if delta.finish_reason in ("stop", "length"):
                timer.finished()
            self._close([delta.request_id])
        self._wake()

    def fail(self, error: OctavoError) -> None:
        """Called by the client: nothing more will arrive."""
        self._error = error
        self._close(list(self.open_requests))

    def _close(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            del self.open_requests[request_id]
        self._client.forget(request_ids)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One engine process, and the requests it has.

    Invariant: `_generations` maps each request that is open in its Generation to it.
    """

    def __init__(
        self,
        process: EngineProcess,
        metrics: EngineMetrics,
        admission: Admission,
        request_timeout_s: float | None = None,
    ) -> None:
        self.metrics = metrics
        self.request_timeout_s = request_timeout_s
        self._admission = admission
        self._process = process
        self._generations: dict[int, Generation] = {}
        self._next_request_id = 0
        self._death: EngineDeadError | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._dead = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # what is queued here is bounded by the requests that are open
        self._socket.bind(process.address)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        process.when_gone(self._notice_exit)
        self._receive()

    async def wait_ready(self) -> EngineInfo:
        """Raises the ConfigError or CheckpointError that the start failed with, or EngineDeadError."""
        return await asyncio.shield(self._ready)

    async def wait_dead(self) -> EngineDeadError:
        await self._dead.wait()
        assert self._death is not None
        return self._death

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    def trouble(self) -> str | None:
        """What keeps the engine from getting on, though its process is there; None when it does."""
        return self._process.pulse.trouble()

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generation:
        """Queue `params.n` completions of every prompt. Raises EngineDeadError when there is no engine, EngineBusyError
        when too much waits for it already."""
        if self._death is not None:
            raise self._death
        self._admit(prompts, params.n)
        generation = Generation(self, self._next_request_id, len(prompts) * params.n)
        for prompt_token_ids in prompts:
            self.send(
                AddRequest(
                    request_id=self._next_request_id,
                    prompt_token_ids=prompt_token_ids,
                    sampling_params=params,
                    priority=priority,
                    cache_salt=cache_salt,
                )
            )
            for _ in range(params.n):
                self._generations[self._next_request_id] = generation
                self._admission.enter(self._next_request_id, len(prompt_token_ids))
                self._next_request_id += 1
        return generation

    def embed(self, prompts: Sequence[list[int]], priority: int = 0, cache_salt: str | None = None) -> Generation:
        """Queue every prompt to become an embedding, one delta each. Raises as `generate` does."""
        if self._death is not None:
            raise self._death
        self._admit(prompts)
        generation = Generation(self, self._next_request_id, len(prompts))
        for request_id, prompt_token_ids in enumerate(prompts, self._next_request_id):
            self.send(
                AddPooling(
                    request_id=request_id, prompt_token_ids=prompt_token_ids, priority=priority, cache_salt=cache_salt
                )
            )
            self._generations[request_id] = generation
            self._admission.enter(request_id, len(prompt_token_ids))
        self._next_request_id += len(prompts)
        return generation

    def _admit(self, prompts: Sequence[list[int]], num_choices: int = 1) -> None:
        try:
            self._admission.check(prompts, num_choices)
        except EngineBusyError as error:
            self.metrics.observe_refusal(error.reason)
            raise

    def send(self, message: ToEngine) -> None:
        if self._death is not None:
            return
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        # Sending may swallow the event that announces an arrival: the descriptor is edge-triggered.
        if has_message(self._socket):
            self._loop.call_soon(self._receive)

    def forget(self, request_ids: list[int]) -> None:
        """Called by a Generation for requests that are no longer open."""
        for request_id in request_ids:
            self._generations.pop(request_id, None)
            self._admission.leave(request_id, served=False)

    def close(self, error: EngineDeadError) -> None:
        """End every open request with `error` and leave the socket. The process is its owner's to end."""
        if not self._socket.closed:
            self._die(error)
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(0)
            self._context.term()

    def _receive(self) -> None:
        """Take what has arrived; after a while let others have their turn, for the engine may be faster than this."""
        if self._take_some():
            self._loop.call_soon(self._receive)

    def _take_some(self) -> bool:
        """Take messages; True if there may be more."""
        for _ in range(MAX_TAKEN):
            if self._socket.closed or not has_message(self._socket):
                return False
            message = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            match message:
                case StepResult():
                    self._take_step(message)
                case EngineReady():
                    self._ready.set_result(message.info)
                case EngineFailed():
                    self._fail(message)
        return True

    def _take_step(self, result: StepResult) -> None:
        if result.stats is not None:
            self.metrics.stats, self.metrics.memory_roof_share = result.stats, result.memory_roof_share
        now = time.monotonic()
        for request_id, started in result.started.items():
            generation = self._generations.get(request_id)
            if generation is not None:
                generation.open_requests[request_id].started(started)
        for delta in result.deltas:
            generation = self._generations.get(delta.request_id)
            if generation is not None:
                self._admission.leave(delta.request_id, served=True)
                generation.receive(delta, now)

    def _fail(self, failure: EngineFailed) -> None:
        known = START_ERRORS.get(failure.kind)
        if not self._ready.done() and known is not None:
            self._ready.set_exception(known(failure.message))
            self._ready.exception()  # it may be that nobody waits
        self._die(EngineDeadError(f"The engine failed: {failure.kind}: {failure.message}"))

    def _notice_exit(self, status: int) -> None:
        """Called from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ended first
            self._loop.call_soon_threadsafe(self._on_exit, status)

    def _on_exit(self, status: int) -> None:
        while self._take_some():
            pass
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._die(EngineDeadError(f"The engine process {how}."))

    def _die(self, error: EngineDeadError) -> None:
        if self._death is not None:
            return
        self._death = error
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()
        for generation in set(self._generations.values()):
            generation.fail(error)
        self._dead.set()

"""EngineClient: the API process's way to the engine. Sends requests, hands out what comes back, notices its death.

Knows token ids only. Everything here runs in one event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence

from octavo.api.admission import Admission
from octavo.api.engine_process import EngineProcess
from octavo.api.generation import Generation
from octavo.api.metrics import EngineMetrics
from octavo.errors import (
    CheckpointError,
    ConfigError,
    EngineBusyError,
    EngineDeadError,
    OctavoError,
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
)
from octavo.ipc.sockets import ApiSocket
from octavo.sampling_params import SamplingParams

__all__ = ["EngineClient"]

START_ERRORS: dict[str, type[OctavoError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, UnknownArchitectureError)
}


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
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        self._admission = admission
        self._process = process
        self._generations: dict[int, Generation] = {}
        self._next_request_id = 0
        self._death: EngineDeadError | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._dead = asyncio.Event()
        self._socket = ApiSocket(process.address, self._take)
        process.when_gone(self._notice_exit)

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
        first = self._next_request_id
        requests = [
            AddRequest(
                request_id=first + index * params.n,
                prompt_token_ids=prompt_token_ids,
                sampling_params=None if index else params,
                priority=priority,
                cache_salt=cache_salt,
            )
            for index, prompt_token_ids in enumerate(prompts)
        ]
        return self._open(prompts, params.n, requests)

    def embed(self, prompts: Sequence[list[int]], priority: int = 0, cache_salt: str | None = None) -> Generation:
        """Queue every prompt to become an embedding, one delta each. Raises as `generate` does."""
        requests = [
            AddPooling(request_id=request_id, prompt_token_ids=prompt, priority=priority, cache_salt=cache_salt)
            for request_id, prompt in enumerate(prompts, self._next_request_id)
        ]
        return self._open(prompts, 1, requests)

    def close(self, error: EngineDeadError) -> None:
        """End every open request with `error` and leave the socket. The process is its owner's to end."""
        self._die(error)
        self._socket.close()

    def _open(
        self, prompts: Sequence[list[int]], num_choices: int, requests: Sequence[AddRequest | AddPooling]
    ) -> Generation:
        if self._death is not None:
            raise self._death
        try:
            self._admission.check(prompts, num_choices)
        except EngineBusyError as error:
            self._metrics.observe_refusal(error.reason)
            raise
        if not all(map(self._socket.send, requests)):
            raise EngineDeadError("The engine process is gone.")  # before its exit status is known
        first, end = self._next_request_id, self._next_request_id + len(prompts) * num_choices
        generation = Generation(range(first, end), self._metrics, self._close, self._request_timeout_s)
        for request_id in range(first, end):
            self._generations[request_id] = generation
            self._admission.enter(request_id, len(prompts[(request_id - first) // num_choices]))
        self._next_request_id = end
        return generation

    def _close(self, request_ids: list[int], message: AbortRequests | FinishRequest | None) -> None:
        """These are no longer open in their Generation; the engine is told `message`, if it is still there."""
        if message is not None and self._death is None:
            self._socket.send(message)
        for request_id in request_ids:
            self._generations.pop(request_id, None)
            self._admission.leave(request_id, served=False)

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepResult():
                self._take_step(message)
            case EngineReady():
                self._ready.set_result(message.info)
            case EngineFailed():
                self._fail(message)

    def _take_step(self, result: StepResult) -> None:
        if result.stats is not None:
            self._metrics.stats, self._metrics.memory_roof_share = result.stats, result.memory_roof_share
        now = time.monotonic()
        for request_id, started in result.started.items():
            generation = self._generations.get(request_id)
            if generation is not None:
                generation.started(request_id, started)
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
        self._socket.take_all()
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

"""Generation: one client request's engine requests, followed together, and the times of each."""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from octavo.api.metrics import EngineMetrics
from octavo.core.step import RequestDelta
from octavo.errors import OctavoError, RequestTimeoutError
from octavo.ipc.messages import AbortRequests, FinishRequest

__all__ = ["Generation", "RequestTimer"]


class RequestTimer:
    """The times of one engine request, from its arrival here, on the clock of `time.monotonic`."""

    __slots__ = ("_arrived", "_first_token", "_last_token", "_metrics")

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._arrived = time.monotonic()
        self._first_token: float | None = None
        self._last_token = 0.0

    def started(self, now: float) -> None:
        self._metrics.observe_queue_time(max(now - self._arrived, 0.0))

    def tokens(self, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        if self._first_token is None:
            self._first_token = self._last_token = now
            self._metrics.observe_first_token(now - self._arrived)
            num_tokens -= 1
        if num_tokens:
            self._metrics.observe_inter_token(now - self._last_token, num_tokens)
        self._last_token = now

    def finished(self) -> None:
        """Call for a request that ended well."""
        if self._first_token is None:
            self._metrics.observe_whole(time.monotonic() - self._arrived)
        else:
            self._metrics.observe_finished(self._first_token - self._arrived, self._last_token - self._arrived)


class Generation:
    """Engine requests followed together, one for each prompt and choice: iterating gives what each wake-up brings.

    Iteration ends when every request has ended, and raises EngineDeadError when the engine is gone. Use it as a
    context manager: leaving aborts what still runs. `started`, `receive` and `fail` feed it.

    Invariant: a request is in `_open` until its last delta has arrived, or it was finished or aborted here; later
    deltas are dropped.
    """

    def __init__(
        self,
        request_ids: range,
        metrics: EngineMetrics,
        close: Callable[[list[int], AbortRequests | FinishRequest | None], None],
        timeout_s: float | None = None,
    ) -> None:
        """`close` is told which requests are no longer open here, and what the engine has to know about it. Ids count
        up, a prompt's choices side by side."""
        self.first_request_id = request_ids.start
        self._open = {request_id: RequestTimer(metrics) for request_id in request_ids}
        self._tell_closed = close
        self._timeout_s = timeout_s
        self._arrived: list[RequestDelta] = []
        self._error: OctavoError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Generation":
        if self._timeout_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out, self._timeout_s)
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
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived

    def abort(self) -> None:
        """End every request that still runs; the iteration ends too."""
        if self._open:
            request_ids = list(self._open)
            self._close(request_ids, AbortRequests(request_ids))

    def finish(self, request_id: int, num_tokens: int) -> None:
        """A stop string was completed by the request's `num_tokens`-th token."""
        if request_id in self._open:
            self._open[request_id].finished()
            self._close([request_id], FinishRequest(request_id, num_tokens))

    def started(self, request_id: int, at: float) -> None:
        """The engine has scheduled the request for the first time."""
        self._open[request_id].started(at)

    def receive(self, delta: RequestDelta, now: float) -> None:
        timer = self._open[delta.request_id]
        timer.tokens(len(delta.new_token_ids), now)
        self._arrived.append(delta)
        if delta.finish_reason is not None:
            if delta.finish_reason in ("stop", "length"):
                timer.finished()
            self._close([delta.request_id])
        self._wake()

    def fail(self, error: OctavoError) -> None:
        """Nothing more will arrive."""
        self._error = error
        self._close(list(self._open))

    def _time_out(self, timeout_s: float) -> None:
        if self._open:
            self._error = RequestTimeoutError(
                f"The request was not finished after {timeout_s:g} s. --request-timeout sets the limit."
            )
            self.abort()

    def _close(self, request_ids: list[int], message: AbortRequests | FinishRequest | None = None) -> None:
        for request_id in request_ids:
            del self._open[request_id]
        self._tell_closed(request_ids, message)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

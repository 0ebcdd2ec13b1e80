"""Admission: bounds what may wait for the engine, and says when there will be room. Kept by the client.

A request is queued from when it is sent until its first token, its end or its reader's leaving.
"""

import time
from collections import deque
from collections.abc import Callable

from octavo.errors import EngineBusyError

__all__ = ["Admission"]

WINDOW_S = 30.0
"""How far back the rate at which requests leave the queue is measured."""
UNKNOWN_WAIT_S = 5.0
"""What a client is told while nothing has left the queue yet."""


class Admission:
    """Invariants: `num_tokens` is the sum of the queued requests' prompts; `_left` reaches back WINDOW_S at most."""

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._clock = clock
        self._queued: dict[int, int] = {}  # request id -> prompt tokens
        self._left: deque[tuple[float, int]] = deque()  # when a request left with a token, and its prompt tokens

    @property
    def num_requests(self) -> int:
        return len(self._queued)

    def check(self, prompt_lengths: list[int]) -> None:
        """Raise EngineBusyError if these would overfill the queue. What is alone in it always fits."""
        num_requests, num_tokens = self.num_requests + len(prompt_lengths), self.num_tokens + sum(prompt_lengths)
        over_requests, over_tokens = num_requests - self.max_requests, num_tokens - self.max_tokens
        if not self._queued or (over_requests <= 0 and over_tokens <= 0):
            return
        if over_requests > 0:
            reason = "queued_reqs"
            what, limit, option = f"{self.num_requests} requests", f"{self.max_requests}", "--max-num-queued-reqs"
        else:
            reason = "queued_tokens"
            what, limit, option = f"{self.num_tokens} prompt tokens", f"{self.max_tokens}", "--max-num-queued-tokens"
        raise EngineBusyError(
            f"{what} wait already and at most {limit} may. Come back after the time in the Retry-After header; the "
            f"server's limit is set by {option}.",
            self._seconds_until_left(over_requests, over_tokens),
        )

    def enter(self, request_id: int, num_prompt_tokens: int) -> None:
        self._queued[request_id] = num_prompt_tokens
        self.num_tokens += num_prompt_tokens

    def leave(self, request_id: int, served: bool) -> None:
        """The request has its first token (`served`) or is gone; one that left before is ignored."""
        num_prompt_tokens = self._queued.pop(request_id, None)
        if num_prompt_tokens is None:
            return
        self.num_tokens -= num_prompt_tokens
        if served:
            now = self._clock()
            self._left.append((now, num_prompt_tokens))
            self._forget_before(now - WINDOW_S)

    def _seconds_until_left(self, num_requests: int, num_tokens: int) -> float:
        """How long until so many requests, with so many prompt tokens, have left at the present rate."""
        now = self._clock()
        self._forget_before(now - WINDOW_S)
        if not self._left:
            return UNKNOWN_WAIT_S
        elapsed = max(now - self._left[0][0], 0.1)
        left_tokens = sum(tokens for _, tokens in self._left)
        return max(num_requests / len(self._left), num_tokens / left_tokens) * elapsed

    def _forget_before(self, time_s: float) -> None:
        while self._left and self._left[0][0] < time_s:
            self._left.popleft()

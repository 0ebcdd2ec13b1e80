"""Admission: bounds what may wait for the engine, and says when there will be room. Kept by the client.

A request is queued from when it is sent until its first token, its end or its reader's leaving.
"""

import math
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from octavo.errors import EngineBusyError

__all__ = ["Admission"]

WINDOW_S = 30.0
"""How far back the rate at which requests leave the queue is measured."""
MAX_LEFT = 4096
"""How many of these are remembered at most."""
UNKNOWN_WAIT_S = 5.0
"""What a client is told while nothing has left the queue yet."""
GRACE_S = 2.0
"""How late a refused request may come back and still find its place kept."""
AHEAD_S = 1.0
"""How long before a refused request may come back its place is kept: waits are told in whole seconds."""


@dataclass(frozen=True, slots=True)
class _Place:
    """In the line of those that were refused and told to come back."""

    due_s: float
    num_requests: int
    num_tokens: int


class Admission:
    """Those that are refused stand in a line, and are told when their turn will be, going by the rate of service. A
    request that comes back is known by its prompts. Its place is kept for a little; newcomers don't take it.

    The rate is measured over the time in which something was queued: an idle engine does not tell how fast it is.

    Invariants: `num_tokens` is the sum of the queued requests' prompts; `_left` reaches back WINDOW_S of busy time at
    most; `_line` holds the due times and keys of `_places`, in order.
    """

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._clock = clock
        self._queued: dict[int, int] = {}  # request id -> prompt tokens
        self._busy_s = 0.0  # until _now
        self._now = clock()
        # Busy time at which one left with a token, and its prompt tokens.
        self._left: deque[tuple[float, int]] = deque(maxlen=MAX_LEFT)
        self._places: dict[int, _Place] = {}  # by the hash of the prompts
        self._line: list[tuple[float, int]] = []
        self._line_requests = self._line_tokens = 0

    @property
    def num_requests(self) -> int:
        return len(self._queued)

    def check(self, prompts: Sequence[Sequence[Hashable]], num_choices: int = 1) -> None:
        """Raise EngineBusyError if `num_choices` of each of these would overfill the queue. What is alone in it always
        fits."""
        self._tick()
        self._drop_late()
        num_requests, num_tokens = len(prompts) * num_choices, sum(map(len, prompts)) * num_choices
        key = hash(tuple(map(tuple, prompts))) if self._line or self._queued else 0
        place = self._places.get(key)
        over_requests = self.num_requests + num_requests - self.max_requests
        over_tokens = self.num_tokens + num_tokens - self.max_tokens
        kept_requests, kept_tokens = (0, 0) if place is not None else self._kept()
        fits = over_requests + kept_requests <= 0 and over_tokens + kept_tokens <= 0
        if not self._queued or (fits and (place is None or place.due_s <= self._now + AHEAD_S)):
            self._leave_line(key)
            return
        if place is None:  # behind all others
            over_requests, over_tokens = over_requests + self._line_requests, over_tokens + self._line_tokens
        if place is None or place.due_s <= self._now:
            self._leave_line(key)
            place = self._stand_in_line(key, num_requests, num_tokens, self._wait_s(over_requests, over_tokens))
        is_short_of_tokens = over_tokens + kept_tokens > 0 >= over_requests + kept_requests
        raise self._refusal(is_short_of_tokens, place.due_s - self._now)

    def _refusal(self, is_short_of_tokens: bool, wait_s: float) -> EngineBusyError:
        if is_short_of_tokens:
            what, limit = f"{self.num_tokens} prompt tokens", f"{self.max_tokens} may"
        else:
            what, limit = f"{self.num_requests} requests", f"{self.max_requests} may, as set by --max-num-queued-reqs"
        return EngineBusyError(
            f"{what} wait already and at most {limit}. Come back after the time in the Retry-After header.",
            wait_s,
            "queued_tokens" if is_short_of_tokens else "queued_reqs",
        )

    def enter(self, request_id: int, num_prompt_tokens: int) -> None:
        self._tick()
        self._queued[request_id] = num_prompt_tokens
        self.num_tokens += num_prompt_tokens

    def leave(self, request_id: int, served: bool) -> None:
        """The request has its first token (`served`) or is gone; one that left before is ignored."""
        if request_id not in self._queued:
            return
        self._tick()
        num_prompt_tokens = self._queued.pop(request_id)
        self.num_tokens -= num_prompt_tokens
        if served:
            self._left.append((self._busy_s, num_prompt_tokens))
            self._forget_old()

    def _tick(self) -> None:
        """Count the time since the last tick as busy, if something was queued in it."""
        now = self._clock()
        if self._queued:
            self._busy_s += now - self._now
        self._now = now

    def _stand_in_line(self, key: int, num_requests: int, num_tokens: int, wait_s: float) -> _Place:
        place = self._places[key] = _Place(self._now + max(1, math.ceil(wait_s)), num_requests, num_tokens)
        insort(self._line, (place.due_s, key))
        self._line_requests += num_requests
        self._line_tokens += num_tokens
        return place

    def _leave_line(self, key: int) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            del self._line[bisect_left(self._line, (place.due_s, key))]
            self._line_requests -= place.num_requests
            self._line_tokens -= place.num_tokens

    def _drop_late(self) -> None:
        while self._line and self._line[0][0] < self._now - GRACE_S:
            self._leave_line(self._line[0][1])

    def _kept(self) -> tuple[int, int]:
        """Requests and prompt tokens that room is kept for, which is never more than half of the queue."""
        due = self._line[: bisect_left(self._line, (self._now + AHEAD_S, 0))]
        places = [self._places[key] for _, key in due]
        num_requests, num_tokens = sum(p.num_requests for p in places), sum(p.num_tokens for p in places)
        return min(num_requests, self.max_requests // 2), min(num_tokens, self.max_tokens // 2)

    def _wait_s(self, num_requests: int, num_tokens: int) -> float:
        """How long until so many requests, with so many prompt tokens, have left at the rate of service."""
        self._forget_old()
        if not self._left:
            return UNKNOWN_WAIT_S
        elapsed = max(self._busy_s - self._left[0][0], 0.1)
        left_tokens = sum(tokens for _, tokens in self._left)
        return max(num_requests / len(self._left), num_tokens / left_tokens) * elapsed

    def _forget_old(self) -> None:
        while self._left and self._left[0][0] < self._busy_s - WINDOW_S:
            self._left.popleft()

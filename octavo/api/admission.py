"""Admission: bounds what may wait for the engine, and says when there will be room. Kept by the client.

A request is queued from when it is sent until its first token, its end or its reader's leaving.
"""

import math
import time
from collections import OrderedDict, deque
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
MAX_WAIT_S = 60.0
"""The longest wait that a client is told. One that has not come back by then is forgotten, so the line never holds
more than those who asked within this time."""
GRACE_S = 2.0
"""How late a refused request may come back and still find its place kept."""
AHEAD_S = 1.0
"""How long before a refused request may come back its place is kept: waits are told in whole seconds."""
MAX_PLACES = 1024
"""Places in the line. A request that finds them taken is told the longest wait, and gets none."""
KEY_TOKENS = 32
"""Tokens at each end of a prompt by which it is known."""


@dataclass(slots=True)
class _Place:
    """One request in the line of those that were refused and told to come back."""

    num_requests: int
    num_tokens: int
    due_s: float = 0.0


class Admission:
    """Refused requests stand in a line, in the order in which they came first, and are told when their turn will be,
    going by the rate of service. One that comes back is known by its prompts; one that does not loses its place.

    The rate is measured over the time in which something was queued: an idle engine does not tell how fast it is.

    Invariants: `num_tokens` is the sum of the queued requests' prompts; `_left` reaches back WINDOW_S of busy time at
    most; every place in `_line` is due at most MAX_WAIT_S from now, and none before `_earliest_s`.
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
        self._line: OrderedDict[int, _Place] = OrderedDict()  # by the hash of the prompts
        self._earliest_s = math.inf

    @property
    def num_requests(self) -> int:
        return len(self._queued)

    def check(self, prompts: Sequence[Sequence[Hashable]], num_choices: int = 1) -> None:
        """Raise EngineBusyError if `num_choices` of each of these would overfill the queue. What is alone in it always
        fits."""
        self._tick()
        self._drop_late()
        num_requests, num_tokens = len(prompts) * num_choices, sum(map(len, prompts)) * num_choices
        key = _key(prompts) if self._line or self._is_over(num_requests, num_tokens) else 0
        if not self._queued:
            self._line.pop(key, None)
            return
        place = self._line.get(key)
        is_early = place is not None and place.due_s > self._now + AHEAD_S
        kept_requests, kept_tokens = (0, 0) if place is not None else self._kept()
        if not is_early and not self._is_over(num_requests + kept_requests, num_tokens + kept_tokens):
            self._line.pop(key, None)
            return
        is_short_of_requests = self.num_requests + num_requests + kept_requests > self.max_requests
        if place is None:
            place = _Place(num_requests, num_tokens)
            if len(self._line) == MAX_PLACES:
                raise self._refusal(not is_short_of_requests, MAX_WAIT_S)
            self._line[key] = place
        if place.due_s <= self._now:
            place.due_s = self._now + self._wait_s(key, num_requests, num_tokens)
            self._earliest_s = min(self._earliest_s, place.due_s)
        raise self._refusal(not is_short_of_requests, place.due_s - self._now)

    def _is_over(self, num_requests: int, num_tokens: int) -> bool:
        return self.num_requests + num_requests > self.max_requests or self.num_tokens + num_tokens > self.max_tokens

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

    def _drop_late(self) -> None:
        if self._earliest_s < self._now - GRACE_S:
            late = [key for key, place in self._line.items() if place.due_s < self._now - GRACE_S]
            for key in late:
                del self._line[key]
            self._earliest_s = min((place.due_s for place in self._line.values()), default=math.inf)

    def _kept(self) -> tuple[int, int]:
        """Requests and prompt tokens that room is kept for, which is never more than half of the queue."""
        if self._earliest_s >= self._now + AHEAD_S:
            return 0, 0
        due = [place for place in self._line.values() if place.due_s < self._now + AHEAD_S]
        num_requests, num_tokens = sum(p.num_requests for p in due), sum(p.num_tokens for p in due)
        return min(num_requests, self.max_requests // 2), min(num_tokens, self.max_tokens // 2)

    def _wait_s(self, key: int, num_requests: int, num_tokens: int) -> float:
        """Whole seconds until this request's turn: those queued and those before it in the line go first."""
        self._forget_old()
        if not self._left:
            return UNKNOWN_WAIT_S
        num_requests += self.num_requests - self.max_requests
        num_tokens += self.num_tokens - self.max_tokens
        for other, place in self._line.items():
            if other == key:
                break
            num_requests += place.num_requests
            num_tokens += place.num_tokens
        elapsed = max(self._busy_s - self._left[0][0], 0.1)
        left_tokens = sum(tokens for _, tokens in self._left)
        wait_s = max(num_requests / len(self._left), num_tokens / left_tokens) * elapsed
        return float(math.ceil(min(max(wait_s, 1.0), MAX_WAIT_S)))

    def _forget_old(self) -> None:
        while self._left and self._left[0][0] < self._busy_s - WINDOW_S:
            self._left.popleft()


def _key(prompts: Sequence[Sequence[Hashable]]) -> int:
    return hash(tuple((len(prompt), *prompt[:KEY_TOKENS], *prompt[-KEY_TOKENS:]) for prompt in prompts))

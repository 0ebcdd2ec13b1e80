"""Retry-After against the wait that clients have, in a replay of a recorded run at three times capacity."""

import heapq
import random
from collections import deque

import pytest

from octavo.api.admission import Admission
from octavo.errors import EngineBusyError

# When requests had their first token, in seconds: benchmarks/overload.py on a busy machine, SmolLM2, 4 running at once,
# prompts of 8 tokens, outputs of 1 to 7.
FIRST_TOKENS = [
    0.31, 0.68, 1.19, 1.19, 1.20, 1.50, 1.76, 2.26, 2.60, 3.04, 3.04, 3.73, 3.73, 4.32, 4.58, 4.58, 4.92, 5.40,
    5.41, 5.71, 6.19, 6.19, 6.39, 6.78, 6.78, 7.14, 7.44, 7.82, 8.08, 8.53, 8.87, 9.37, 9.37, 9.60, 9.88, 10.46,
    10.46, 10.60, 10.81, 10.95, 11.18, 11.32, 11.54, 12.17, 12.17, 12.80, 12.80, 13.09, 13.09, 13.31, 13.90,
    14.52, 14.52, 14.52, 14.82, 15.40, 15.40, 15.84, 15.84, 16.51, 16.51, 16.95, 16.95, 16.95, 17.61, 17.98,
    18.46, 18.46, 18.87, 18.87, 19.79, 19.79, 20.48, 20.48, 20.80, 21.13, 21.44, 21.80, 22.11, 23.26, 23.26,
    23.79, 23.79, 24.49, 24.80, 25.91, 25.91, 25.91, 26.31, 27.07, 27.07, 28.09, 28.09, 28.09, 29.41, 29.41,
    29.41, 29.61, 29.82, 30.18, 30.18, 30.69, 30.92, 31.30, 31.30, 31.56, 31.82,
]  # fmt: skip


def replay(overload: float, max_requests: int, seed: int) -> list[tuple[float, float]]:
    """New clients arrive at random for a minute, each comes back when it is told to, and the recorded first tokens
    (over and over) empty the queue. Returns, of each that was refused, the seconds it was told first and those it had
    to wait."""
    draw, now, period = random.Random(seed), 0.0, FIRST_TOKENS[-1]
    admission = Admission(max_requests, 1_000_000, clock=lambda: now)
    arrivals = []
    while now < 60.0:
        now += draw.expovariate(overload * len(FIRST_TOKENS) / period)
        arrivals.append((now, len(arrivals)))
    leaving = deque(period * turn + time for turn in range(20) for time in FIRST_TOKENS)
    now, queue, refused, waits = 0.0, deque[int](), dict[int, tuple[float, float]](), []
    while arrivals:
        if leaving[0] < arrivals[0][0]:
            now = leaving.popleft()
            if queue:
                admission.leave(queue.popleft(), served=True)
            continue
        now, client = heapq.heappop(arrivals)
        try:
            admission.check([[client] * 8])
        except EngineBusyError as error:
            refused.setdefault(client, (now, error.retry_after_s))
            heapq.heappush(arrivals, (now + error.retry_after_s, client))
            continue
        admission.enter(client, 8)
        queue.append(client)
        if client in refused:
            at, told = refused[client]
            waits.append((told, now - at))
    return waits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("overload", "max_requests"), [(3.0, 8), (3.0, 32), (1.5, 8)])
def test_the_wait_told_is_within_a_factor_of_two_of_the_wait_had(overload: float, max_requests: int, seed: int) -> None:
    waits = replay(overload, max_requests, seed)
    within = [0.5 <= told / waited <= 2.0 for told, waited in waits]
    assert len(waits) > 30
    assert sum(within) >= 0.95 * len(within)

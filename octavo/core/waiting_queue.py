"""WaitingQueue: the requests that wait for admission, most urgent first. Knows nothing of blocks, budgets or time."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from octavo.core.request import Request

__all__ = ["Urgency", "WaitingQueue"]

Urgency = tuple[int, int]
"""Level and arrival: the least is first."""


class WaitingQueue:
    """Ordered by urgency, the least first; adding and taking cost O(log n), all else O(1) on average. A request keeps
    its urgency from its arrival until it is over, whether it waits or runs.

    Invariants: `_requests` holds what waits; each of them that is ready has an entry in `_heap`, and none has two.
    Entries of requests that are gone, or not ready after all, stay until they reach the top or are as many as the
    others; `_entered` has the ids of all that have one.
    """

    def __init__(self, is_ready: Callable[[Request], bool] = lambda request: True) -> None:
        """`is_ready`: whether a request may be scheduled."""
        self._is_ready = is_ready
        self._requests: dict[int, Request] = {}
        self._urgencies: dict[int, Urgency] = {}
        self._heap: list[tuple[Urgency, Request]] = []
        self._entered: set[int] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def urgency(self, request: Request) -> Urgency:
        return self._urgencies[request.request_id]

    def arrive(self, request: Request, urgency: Urgency) -> None:
        """A new request waits."""
        self._urgencies[request.request_id] = urgency
        self.add(request)

    def leave(self, request_id: int) -> None:
        """A request that does not wait is over."""
        del self._urgencies[request_id]

    def add(self, request: Request) -> None:
        """A request waits again."""
        self._requests[request.request_id] = request
        self.recheck(request)

    def recheck(self, request: Request) -> None:
        """If the request has become ready, it may be first from now on; one that does not wait is ignored."""
        request_id = request.request_id
        if request_id in self._requests and request_id not in self._entered and self._is_ready(request):
            heappush(self._heap, (self._urgencies[request_id], request))
            self._entered.add(request_id)

    def first(self) -> Request | None:
        """The most urgent request that is ready."""
        while self._heap:
            request = self._heap[0][1]
            if request.request_id in self._requests and self._is_ready(request):
                return request
            heappop(self._heap)
            self._entered.discard(request.request_id)
        return None

    def remove(self, request_id: int) -> None:
        del self._requests[request_id]
        if len(self._heap) > 2 * len(self._requests) + 64:
            ready = [request for request in self._requests.values() if self._is_ready(request)]
            self._heap = [(self._urgencies[request.request_id], request) for request in ready]
            self._entered = {request.request_id for request in ready}
            heapify(self._heap)

    def check(self) -> None:
        """Assert the invariants."""
        entries = {id(request) for _, request in self._heap}
        assert len(entries) == len(self._heap)
        assert self._entered == {request.request_id for _, request in self._heap}
        assert self._requests.keys() <= self._urgencies.keys()
        assert all(id(request) in entries for request in self._requests.values() if self._is_ready(request))
        assert len(self._heap) <= 2 * len(self._requests) + 64 + 1
        assert all(self._heap[(index - 1) // 2] <= self._heap[index] for index in range(1, len(self._heap)))

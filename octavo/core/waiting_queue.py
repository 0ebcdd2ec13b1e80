"""WaitingQueue: the requests that wait for admission, most urgent first. Knows nothing of blocks, budgets or time."""

from heapq import heapify, heappop, heappush

from octavo.core.request import Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Ordered by `Request.urgency`, the least first; adding and taking cost O(log n), all else O(1) on average.

    Invariants: `_requests` holds what waits; each of them that is ready has an entry in `_heap`, and none has two.
    Entries of requests that are gone, or not ready after all, stay until they reach the top or are as many as the
    others; `_entered` has the ids of all that have one.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._entered: set[int] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.recheck(request)

    def recheck(self, request: Request) -> None:
        """If the request has become ready, it may be first from now on; one that does not wait is ignored."""
        request_id = request.request_id
        if request.is_ready and request_id in self._requests and request_id not in self._entered:
            heappush(self._heap, (request.urgency, request))
            self._entered.add(request_id)

    def first(self) -> Request | None:
        """The most urgent request that is ready."""
        while self._heap:
            request = self._heap[0][1]
            if request.is_ready and request.request_id in self._requests:
                return request
            heappop(self._heap)
            self._entered.discard(request.request_id)
        return None

    def remove(self, request_id: int) -> None:
        del self._requests[request_id]
        if len(self._heap) > 2 * len(self._requests) + 64:
            ready = [request for request in self._requests.values() if request.is_ready]
            self._heap = [(request.urgency, request) for request in ready]
            self._entered = {request.request_id for request in ready}
            heapify(self._heap)

    def check(self) -> None:
        """Assert the invariants."""
        entries = {id(request) for _, request in self._heap}
        assert len(entries) == len(self._heap)
        assert self._entered == {request.request_id for _, request in self._heap}
        assert all(id(request) in entries for request in self._requests.values() if request.is_ready)
        assert len(self._heap) <= 2 * len(self._requests) + 64 + 1
        assert all(self._heap[(index - 1) // 2] <= self._heap[index] for index in range(1, len(self._heap)))

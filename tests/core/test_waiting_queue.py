"""WaitingQueue: most urgent first, among those that are ready."""

import random

from octavo.core.request import Request
from octavo.core.waiting_queue import WaitingQueue
from octavo.sampling_params import SamplingParams


class Queue(WaitingQueue):
    """One whose requests are ready unless they are in `unready`."""

    def __init__(self) -> None:
        self.unready: set[int] = set()
        super().__init__(lambda request: request.request_id not in self.unready)

    def arrive_with(self, request_id: int, level: int = 0, is_ready: bool = True) -> Request:
        nothing = frozenset[int]()
        request = Request(request_id, [1], SamplingParams(), 16, nothing, nothing, seed=0)
        if not is_ready:
            self.unready.add(request_id)
        self.arrive(request, (level, request_id))
        return request


def take_all(queue: WaitingQueue) -> list[int]:
    taken = []
    while (request := queue.first()) is not None:
        queue.remove(request.request_id)
        taken.append(request.request_id)
    return taken


def test_the_most_urgent_is_first_and_of_equals_the_one_that_came_first() -> None:
    queue = Queue()
    for request_id, level in enumerate([5, -1, 5, 0]):
        queue.arrive_with(request_id, level)
    assert take_all(queue) == [1, 3, 0, 2]


def test_one_that_is_not_ready_takes_its_place_when_it_is() -> None:
    queue = Queue()
    late = queue.arrive_with(0, is_ready=False)
    queue.arrive_with(1)
    first = queue.first()
    assert first is not None
    assert first.request_id == 1
    queue.unready.clear()
    queue.recheck(late)
    queue.recheck(late)
    assert take_all(queue) == [0, 1]


def test_any_history_gives_what_a_sorted_list_gives_and_leaves_no_dead_weight() -> None:
    draw, queue, waiting = random.Random(0), Queue(), dict[int, Request]()
    waiting[-1] = queue.arrive_with(-1, level=9)  # stays
    for request_id in range(3_000):
        waiting[request_id] = queue.arrive_with(request_id, draw.randrange(5), is_ready=draw.random() < 0.8)
        if draw.random() < 0.9:
            gone = draw.choice(list(waiting)[1:])
            queue.remove(gone)
            del waiting[gone]
        late = draw.choice(list(waiting.values()))
        queue.unready.discard(late.request_id)
        queue.recheck(late)
        ready = [request for request in waiting.values() if request.request_id not in queue.unready]
        assert queue.first() is min(ready, key=queue.urgency, default=None)
        assert len(queue) == len(waiting)
        assert len(queue._heap) <= 2 * len(waiting) + 65

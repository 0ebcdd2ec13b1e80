"""WaitingQueue: most urgent first, among those that are ready."""

import random

from octavo.core.request import Request
from octavo.core.waiting_queue import WaitingQueue
from octavo.sampling_params import SamplingParams


def make_request(request_id: int, level: int = 0, is_ready: bool = True) -> Request:
    nothing = frozenset[int]()
    request = Request(request_id, [1], SamplingParams(), 16, nothing, nothing, seed=0)
    request.urgency, request.waits_for_grammar = (level, request_id), not is_ready
    return request


def take_all(queue: WaitingQueue) -> list[int]:
    taken = []
    while (request := queue.first()) is not None:
        queue.remove(request.request_id)
        taken.append(request.request_id)
    return taken


def test_the_most_urgent_is_first_and_of_equals_the_one_that_came_first() -> None:
    queue = WaitingQueue()
    for request in (make_request(0, 5), make_request(1, -1), make_request(2, 5), make_request(3, 0)):
        queue.add(request)
    assert take_all(queue) == [1, 3, 0, 2]


def test_one_that_is_not_ready_takes_its_place_when_it_is() -> None:
    queue = WaitingQueue()
    late = make_request(0, is_ready=False)
    queue.add(late)
    queue.add(make_request(1))
    first = queue.first()
    assert first is not None
    assert first.request_id == 1
    late.waits_for_grammar = False
    queue.recheck(late)
    queue.recheck(late)
    assert take_all(queue) == [0, 1]


def test_any_history_gives_what_a_sorted_list_gives_and_leaves_no_dead_weight() -> None:
    draw, queue, waiting = random.Random(0), WaitingQueue(), dict[int, Request]()
    waiting[-1] = make_request(-1, level=9)  # stays
    queue.add(waiting[-1])
    for request_id in range(3_000):
        request = make_request(request_id, draw.randrange(5), is_ready=draw.random() < 0.8)
        queue.add(request)
        waiting[request_id] = request
        if draw.random() < 0.9:
            gone = draw.choice(list(waiting)[1:])
            queue.remove(gone)
            del waiting[gone]
        late = draw.choice(list(waiting.values()))
        late.waits_for_grammar = False
        queue.recheck(late)
        ready = [request for request in waiting.values() if request.is_ready]
        assert queue.first() is min(ready, key=lambda request: request.urgency, default=None)
        assert len(queue) == len(waiting)
        assert len(queue._heap) <= 2 * len(waiting) + 65

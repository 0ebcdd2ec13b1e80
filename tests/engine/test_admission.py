import pytest

from octavo.engine.admission import Admission
from octavo.errors import EngineBusyError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def filled(admission: Admission, count: int, length: int = 10) -> None:
    for request_id in range(count):
        admission.enter(request_id, length)


def test_a_full_queue_refuses_with_numbers_and_the_option() -> None:
    admission = Admission(max_requests=3, max_tokens=1000)
    filled(admission, 3)
    with pytest.raises(EngineBusyError, match=r"3 requests wait already and at most 3 may.*--max-num-queued-reqs"):
        admission.check([10])


def test_tokens_are_bounded_too_but_one_request_alone_always_fits() -> None:
    admission = Admission(max_requests=10, max_tokens=100)
    admission.check([5000])
    filled(admission, 1, length=90)
    admission.check([10])
    with pytest.raises(EngineBusyError, match="90 prompt tokens wait already and at most 100 may"):
        admission.check([11])


def test_what_leaves_makes_room_once() -> None:
    admission = Admission(max_requests=2, max_tokens=1000)
    filled(admission, 2)
    admission.leave(0, served=True)
    admission.leave(0, served=True)
    admission.check([10])
    assert (admission.num_requests, admission.num_tokens) == (1, 10)


def test_the_wait_follows_the_rate_at_which_requests_leave() -> None:
    clock = Clock()
    admission = Admission(max_requests=20, max_tokens=10_000, clock=clock)
    filled(admission, 30)
    for request_id in range(10):  # one every two seconds
        admission.leave(request_id, served=True)
        clock.now += 2.0
    with pytest.raises(EngineBusyError) as refusal:
        admission.check([10] * 6)  # six more than there is room for
    assert refusal.value.retry_after_s == pytest.approx(6 * 2.0)


def test_aborted_requests_say_nothing_about_the_rate() -> None:
    admission = Admission(max_requests=1, max_tokens=1000, clock=Clock())
    filled(admission, 2)
    admission.leave(0, served=False)
    with pytest.raises(EngineBusyError) as refusal:
        admission.check([10])
    assert refusal.value.retry_after_s == 5.0


def test_what_left_long_ago_is_forgotten() -> None:
    clock = Clock()
    admission = Admission(max_requests=10, max_tokens=1000, clock=clock)
    for request_id in range(500):
        admission.enter(request_id, 10)
        admission.leave(request_id, served=True)
        clock.now += 1.0
    assert len(admission._left) <= 31

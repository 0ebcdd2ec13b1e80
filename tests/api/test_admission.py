import pytest

from octavo.api.admission import GRACE_S, MAX_WAIT_S, Admission
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
        admission.check([[0] * 10])


def test_tokens_are_bounded_too_but_one_request_alone_always_fits() -> None:
    admission = Admission(max_requests=10, max_tokens=100)
    admission.check([[0] * 5000])
    filled(admission, 1, length=90)
    admission.check([[0] * 10])
    with pytest.raises(EngineBusyError, match="90 prompt tokens wait already and at most 100 may"):
        admission.check([[0] * 11])


def test_what_leaves_makes_room_once() -> None:
    admission = Admission(max_requests=2, max_tokens=1000)
    filled(admission, 2)
    admission.leave(0, served=True)
    admission.leave(0, served=True)
    admission.check([[0] * 10])
    assert (admission.num_requests, admission.num_tokens) == (1, 10)


def test_the_wait_follows_the_rate_at_which_requests_leave() -> None:
    clock = Clock()
    admission = Admission(max_requests=20, max_tokens=10_000, clock=clock)
    filled(admission, 30)
    for request_id in range(10):  # one every two seconds
        admission.leave(request_id, served=True)
        clock.now += 2.0
    with pytest.raises(EngineBusyError) as refusal:
        admission.check([[0] * 10], num_choices=6)  # six more than there is room for
    assert refusal.value.retry_after_s == pytest.approx(6 * 2.0)


def test_aborted_requests_say_nothing_about_the_rate() -> None:
    admission = Admission(max_requests=1, max_tokens=1000, clock=Clock())
    filled(admission, 2)
    admission.leave(0, served=False)
    with pytest.raises(EngineBusyError) as refusal:
        admission.check([[0] * 10])
    assert refusal.value.retry_after_s == 5.0


def test_what_left_long_ago_is_forgotten() -> None:
    clock = Clock()
    admission = Admission(max_requests=10, max_tokens=1000, clock=clock)
    for request_id in range(500):
        admission.enter(request_id, 10)
        clock.now += 1.0
        admission.leave(request_id, served=True)
    assert len(admission._left) <= 31


def told(admission: Admission, prompt: list[int]) -> float:
    """Seconds to wait, 0 for a request that is taken."""
    try:
        admission.check([prompt])
    except EngineBusyError as error:
        return error.retry_after_s
    return 0.0


def busy_admission(clock: Clock, max_requests: int, num_waiting: int) -> Admission:
    """One request leaves each second; `num_waiting` are queued."""
    admission = Admission(max_requests, max_tokens=1_000_000, clock=clock)
    filled(admission, num_waiting + 10)
    for request_id in range(num_waiting, num_waiting + 10):
        clock.now += 1.0
        admission.leave(request_id, served=True)
    return admission


def test_idle_time_says_nothing_about_the_rate() -> None:
    clock = Clock()
    admission = busy_admission(clock, max_requests=4, num_waiting=0)
    clock.now += 20.0
    filled(admission, 4)
    assert told(admission, [1]) == 1.0


def test_those_that_are_refused_stand_in_line() -> None:
    admission = busy_admission(Clock(), max_requests=4, num_waiting=4)
    assert [told(admission, [prompt]) for prompt in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert told(admission, [2]) == 3.0  # too early, and in no other place for it


def test_one_that_comes_back_finds_its_place_kept() -> None:
    clock = Clock()
    admission = busy_admission(clock, max_requests=4, num_waiting=4)
    assert told(admission, [1]) == 1.0
    admission.leave(0, served=True)
    clock.now += 1.0
    assert told(admission, [2]) > 0  # a newcomer
    assert told(admission, [1]) == 0


def test_one_that_does_not_come_back_loses_its_place() -> None:
    clock = Clock()
    admission = busy_admission(clock, max_requests=4, num_waiting=4)
    assert told(admission, [1]) == 1.0
    admission.leave(0, served=True)
    clock.now += 3.5
    assert told(admission, [2]) == 0


def test_places_are_kept_in_no_more_than_half_of_the_queue() -> None:
    clock = Clock()
    admission = busy_admission(clock, max_requests=4, num_waiting=4)
    for prompt in range(4):
        assert told(admission, [prompt]) > 0
    for request_id in range(3):
        admission.leave(request_id, served=True)
    clock.now += 3.0
    assert told(admission, [9]) == 0


def test_a_crowd_that_does_not_come_back_is_forgotten() -> None:
    clock = Clock()
    admission = busy_admission(clock, max_requests=4, num_waiting=4)
    crowd = [told(admission, [prompt, 9]) for prompt in range(5000)]
    assert max(crowd) <= MAX_WAIT_S
    assert told(admission, [1]) <= MAX_WAIT_S
    clock.now += MAX_WAIT_S + GRACE_S + 1
    assert told(admission, [2]) == 5.0  # nobody has left lately, and nobody is before it
    assert len(admission._line) == 1


def test_one_that_returns_in_time_is_behind_those_only_that_came_before_it() -> None:
    clock = Clock()
    admission = busy_admission(clock, max_requests=4, num_waiting=4)
    waits = [told(admission, [prompt]) for prompt in range(100)]
    assert (waits[9], waits[69], waits[99]) == (9.0, MAX_WAIT_S, MAX_WAIT_S)
    for _ in range(59):
        clock.now += 1.0
        admission.enter(1000, 10)
        admission.leave(1000, served=True)
    clock.now += 1.0
    assert told(admission, [80]) < told(admission, [99]) <= 40.0

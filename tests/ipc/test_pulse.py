"""Pulse: silence and standstill are told apart from work."""

import threading
from pathlib import Path

import pytest

from octavo.ipc import pulse as pulse_module
from octavo.ipc.pulse import SILENT_S, STALLED_S, Pulse, start_beating


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only entry."""
    now = [1000.0]
    monkeypatch.setattr(pulse_module.time, "monotonic", lambda: now[0])
    return now


def beat(pulse: Pulse, clock: list[float], seconds: float, has_progressed: bool) -> None:
    """A beat each second."""
    for _ in range(round(seconds)):
        clock[0] += 1
        pulse.beat(has_progressed)


def test_a_working_engine_is_fine_for_as_long_as_it_takes(clock: list[float], tmp_path: Path) -> None:
    engine, api = Pulse(tmp_path), Pulse(tmp_path)
    beat(engine, clock, 600, True)
    assert api.trouble() is None


def test_silence_is_trouble_until_the_next_beat(clock: list[float], tmp_path: Path) -> None:
    engine, api = Pulse(tmp_path), Pulse(tmp_path)
    engine.beat(True)
    clock[0] += SILENT_S - 0.1
    assert api.trouble() is None
    clock[0] += 0.2
    assert "no sign of life for 3.1 s" in str(api.trouble())
    engine.beat(True)
    assert api.trouble() is None


def test_beats_without_progress_are_trouble_after_a_while(clock: list[float], tmp_path: Path) -> None:
    engine, api = Pulse(tmp_path), Pulse(tmp_path)
    engine.beat(True)
    beat(engine, clock, STALLED_S - 1, False)
    assert api.trouble() is None
    beat(engine, clock, 2, False)
    assert "no progress for 31.0 s" in str(api.trouble())
    beat(engine, clock, 1, True)
    assert api.trouble() is None


@pytest.mark.parametrize(("is_idle", "numbers", "expected"), [(False, [1, 2, 2], [True, True, False]),
                                                              (True, [1, 1, 1], [True, True, True])])  # fmt: skip
def test_a_beat_has_progressed_when_the_number_changed_or_nothing_is_to_do(
    monkeypatch: pytest.MonkeyPatch, is_idle: bool, numbers: list[int], expected: list[bool]
) -> None:
    monkeypatch.setattr(pulse_module, "PULSE_S", 0.001)
    beats: list[bool] = []
    is_done = threading.Event()

    class Recorder:
        def beat(self, has_progressed: bool) -> None:
            beats.append(has_progressed)
            if len(beats) == 3:
                is_done.set()
                threading.Event().wait()

    start_beating(Recorder(), iter(numbers).__next__, lambda: is_idle)  # type: ignore[arg-type]
    assert is_done.wait(5)
    assert beats == expected

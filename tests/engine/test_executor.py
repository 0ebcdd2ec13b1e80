"""Executors: a step that needs no masks is computed to its end unasked; one that does holds back those after it."""

from collections.abc import Callable

import pytest

from octavo.core.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from octavo.engine.executor import InlineExecutor, ThreadExecutor

MASKED, FAILING, FAILING_LATE = 100, 200, 300
MASKS: TokenMasks = {7: (b"\xff",)}


class FakeRunner:
    """Notes what it is asked. Steps numbered from MASKED on wait for masks, those from FAILING on raise, those from
    FAILING_LATE on when they are finished."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._begun = -1

    def begin(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        self.calls.append(f"begin {step.step_id}")
        if FAILING <= step.step_id < FAILING_LATE:
            raise RuntimeError("the device is on fire")
        if step.step_id >= MASKED:
            self._begun = step.step_id
            return None
        return ModelRunnerOutput([step.step_id], [[1]], [None])

    def finish(self, masks: TokenMasks) -> ModelRunnerOutput:
        assert masks == MASKS
        self.calls.append(f"finish {self._begun}")
        if self._begun >= FAILING_LATE:
            raise RuntimeError("the device is on fire")
        return ModelRunnerOutput([self._begun], [[1]], [None])

    def forget(self, request_ids: list[int]) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("make", [InlineExecutor, ThreadExecutor])
def test_each_step_has_its_own_result(make: Callable[[FakeRunner], InlineExecutor | ThreadExecutor]) -> None:
    runner = FakeRunner()
    executor = make(runner)
    for step_id in (1, MASKED, 2, FAILING, FAILING_LATE, 3):
        handle = executor.submit(SchedulerOutput(step_id, []))
        masks: TokenMasks = MASKS if step_id in (MASKED, FAILING, FAILING_LATE) else {}
        if step_id < FAILING:
            assert handle.result(masks).request_ids == [step_id]
        else:
            with pytest.raises(RuntimeError, match="on fire"):
                handle.result(masks)


def test_steps_behind_one_that_waits_for_masks_come_after_it_in_order() -> None:
    runner = FakeRunner()
    executor = ThreadExecutor(runner)
    handles = [executor.submit(SchedulerOutput(step_id, [])) for step_id in (1, MASKED, 2, MASKED + 1, 3)]
    assert handles[0].result().request_ids == [1]
    for step_id, handle in zip((MASKED, 2, MASKED + 1, 3), handles[1:], strict=True):
        assert handle.result(MASKS if step_id >= MASKED else {}).request_ids == [step_id]
    order = "begin 1, begin 100, finish 100, begin 2, begin 101, finish 101, begin 3"
    assert ", ".join(runner.calls) == order


def test_a_step_without_masks_is_computed_though_nobody_asks_for_its_result() -> None:
    runner = FakeRunner()
    executor = ThreadExecutor(runner)
    handles = [executor.submit(SchedulerOutput(step_id, [])) for step_id in (1, 2, 3)]
    assert handles[-1].result().request_ids == [3]
    assert runner.calls == ["begin 1", "begin 2", "begin 3"]

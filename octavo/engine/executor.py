"""Executors of one process: steps computed in the caller's thread, or one after the other in a worker thread."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from octavo.core.step import NO_MASKS, ModelRunnerOutput, SchedulerOutput, TokenMasks

__all__ = ["InlineExecutor", "Runner", "ThreadExecutor"]


class Runner(Protocol):
    """What computes steps, one after the other: a ModelRunner, or one of those that pool."""

    def begin(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Compute a step: to its end, or, where it samples for structured output, up to its logits. Then it returns
        None, and `finish` comes before the next step."""
        ...

    def finish(self, masks: TokenMasks) -> ModelRunnerOutput:
        """Sample for the step that `begin` left there."""
        ...

    def forget(self, request_ids: list[int]) -> None: ...


class InlineExecutor:
    """`submit` computes the step, as far as it can without masks, before it returns: for one step in flight."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, scheduler_output: SchedulerOutput) -> "_InlineStep":
        try:
            return _InlineStep(self._runner, self._runner.begin(scheduler_output))
        except Exception as error:
            return _InlineStep(self._runner, error)


class _InlineStep:
    __slots__ = ("_output", "_runner")

    def __init__(self, runner: Runner, output: ModelRunnerOutput | Exception | None) -> None:
        self._runner = runner
        self._output = output

    def result(self, masks: TokenMasks = NO_MASKS) -> ModelRunnerOutput:
        if self._output is None:
            return self._runner.finish(masks)
        if isinstance(self._output, Exception):
            raise self._output
        return self._output


class ThreadExecutor:
    """`submit` queues the step for a worker thread, so that the next is scheduled while it computes.

    Invariant: only the worker touches the runner, `_unfinished` and `_held_back`. While a step stands unfinished, for
    want of its masks, those after it are held back, in order. The worker itself never waits, so that a program that
    drops its engine between two steps ends.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-runner")
        self._unfinished: _ThreadStep | None = None
        self._held_back: deque[_ThreadStep] = deque()

    def submit(self, scheduler_output: SchedulerOutput) -> "_ThreadStep":
        step = _ThreadStep(self, scheduler_output)
        self._worker.submit(self._begin, step)
        return step

    def finish(self, step: "_ThreadStep", masks: TokenMasks) -> None:
        """Hand over a step's masks."""
        self._worker.submit(self._finish, step, masks)

    def _begin(self, step: "_ThreadStep") -> None:
        if self._unfinished is not None:
            self._held_back.append(step)
            return
        try:
            output = self._runner.begin(step.scheduler_output)
        except Exception as error:
            step.output.set_exception(error)
            return
        if output is None:
            self._unfinished = step
        else:
            step.output.set_result(output)

    def _finish(self, step: "_ThreadStep", masks: TokenMasks) -> None:
        if self._unfinished is not step:
            return  # it has failed
        try:
            step.output.set_result(self._runner.finish(masks))
        except Exception as error:
            step.output.set_exception(error)
        self._unfinished = None
        while self._held_back and self._unfinished is None:
            self._begin(self._held_back.popleft())


class _ThreadStep:
    __slots__ = ("_executor", "output", "scheduler_output")

    def __init__(self, executor: ThreadExecutor, scheduler_output: SchedulerOutput) -> None:
        self._executor = executor
        self.scheduler_output = scheduler_output
        self.output: Future[ModelRunnerOutput] = Future()

    def result(self, masks: TokenMasks = NO_MASKS) -> ModelRunnerOutput:
        if masks:
            self._executor.finish(self, masks)
        return self.output.result()

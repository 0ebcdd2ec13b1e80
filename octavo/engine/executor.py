"""Executors of one process: steps computed in the caller's thread, or one after the other in a worker thread."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from msgspec import Struct

from octavo.core.step import ModelRunnerOutput, SchedulerOutput, StepHandle

__all__ = ["InlineExecutor", "Runner", "ThreadExecutor"]


class Runner(Protocol):
    """What computes a step: a ModelRunner, or one of those that pool."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput: ...
    def forget(self, request_ids: list[int]) -> None: ...


class _Done(Struct, frozen=True):
    """A step that is over: the handle costs a fraction of a Future."""

    output: ModelRunnerOutput | Exception

    def result(self) -> ModelRunnerOutput:
        if isinstance(self.output, Exception):
            raise self.output
        return self.output


class InlineExecutor:
    """`submit` computes the step before it returns: for one step in flight."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, scheduler_output: SchedulerOutput) -> StepHandle:
        try:
            return _Done(self._runner.execute(scheduler_output))
        except Exception as error:
            return _Done(error)


class ThreadExecutor:
    """`submit` queues the step for a worker thread, so that the next is scheduled while it computes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-runner")

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._worker.submit(self._runner.execute, scheduler_output)

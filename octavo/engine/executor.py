"""Executors of one process: steps computed in the caller's thread, or one after the other in a worker thread."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from octavo.core.step import ModelRunnerOutput, SchedulerOutput

__all__ = ["InlineExecutor", "Runner", "ThreadExecutor"]


class Runner(Protocol):
    """What computes a step: a ModelRunner, or one of those that pool."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput: ...
    def forget(self, request_ids: list[int]) -> None: ...


class InlineExecutor:
    """`submit` computes the step before it returns: for one step in flight."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        step: Future[ModelRunnerOutput] = Future()
        try:
            step.set_result(self._runner.execute(scheduler_output))
        except Exception as error:
            step.set_exception(error)
        return step


class ThreadExecutor:
    """`submit` queues the step for a worker thread, so that the next is scheduled while it computes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-runner")

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._worker.submit(self._runner.execute, scheduler_output)

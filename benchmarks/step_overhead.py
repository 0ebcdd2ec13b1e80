"""Python's share of a decode step: all that is not inside a native call that computes.

    python benchmarks/step_overhead.py [--model FILE] [--streams 1,64] [--steps 100] [--enforce-eager] [--temperature 0]

So many streams decode in this thread. A step is `LLMEngine.step()`: schedule, inputs, model, sampling, update.
Times are the thread's own CPU time, which a busy neighbour hardly changes. `schedule`, `execute` and `update` are
Python's alone, native calls taken off. They are measured apart from whole steps: reading a clock costs some 5 µs then.
"""

import argparse
import inspect
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from server_overhead import default_model

from octavo import LLM, SamplingParams
from octavo.devices.cpu import _cpu
from octavo.engine.llm_engine import LLMEngine
from octavo.ipc.messages import AddRequest

PARTS = ("schedule", "execute", "update")


class Clock:
    """Time spent in named parts, those inside others taken off."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner_s = [0.0]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner_s.append(0.0)
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = time.thread_time() - start
                self.seconds[part] += seconds - self._inner_s.pop()
                self._inner_s[-1] += seconds

        return wrapper


def main() -> None:
    parser = argparse.ArgumentParser(description="Python's share of a decode step.")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--streams", default="1,64", help="numbers of streams, comma-separated")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    clock = Clock()
    for name, value in vars(_cpu).items():
        if callable(value) and not inspect.isclass(value):
            setattr(_cpu, name, clock.timed("native", value))
    run = clock.timed("native", _cpu.StepReplay.run)
    _cpu.StepReplay.run = lambda *args: run(*args)  # type: ignore[method-assign, assignment]
    llm = LLM(args.model, use_tqdm=False, enforce_eager=args.enforce_eager, enable_prefix_caching=False)
    forward = llm.engine.executor._runner.forward  # type: ignore[attr-defined]
    if not args.enforce_eager:
        forward.run = clock.timed("native", forward.run)
    engine, streams = llm.engine, [int(text) for text in args.streams.split(",")]
    wholes = [measure(engine, clock, number, args.steps, args.temperature) for number in streams]
    engine.scheduler.schedule = clock.timed("schedule", engine.scheduler.schedule)  # type: ignore[method-assign]
    engine.scheduler.update = clock.timed("update", engine.scheduler.update)  # type: ignore[method-assign]
    engine.executor.submit = clock.timed("execute", engine.executor.submit)  # type: ignore[method-assign]
    print("| streams | " + " | ".join(f"{part}, µs" for part in PARTS) + " | step in Python, µs | least | native, µs |")
    print("|" + "---|" * (len(PARTS) + 4))
    for num_streams, whole in zip(streams, wholes, strict=True):
        rows = measure(engine, clock, num_streams, args.steps, args.temperature)
        cells = [statistics.median(row[part] for row in rows) for part in PARTS]
        python = [row["step"] for row in whole]
        cells += [statistics.median(python), min(python), statistics.median(row["native"] for row in whole)]
        print(f"| {num_streams} | " + " | ".join(f"{cell * 1e6:.0f}" for cell in cells) + " |", flush=True)


def measure(engine: LLMEngine, clock: Clock, num_streams: int, num_steps: int, temperature: float) -> list[Any]:
    """The parts of each of `num_steps` steps, once every stream decodes."""
    step = clock.timed("step", engine.step)
    for i in range(num_streams):
        params = SamplingParams(temperature=temperature, max_tokens=num_steps + 8, ignore_eos=True, seed=i)
        engine.add_request(
            AddRequest(request_id=1000 * num_streams + i, prompt_token_ids=[7 + i] * 16, sampling_params=params)
        )
    rows: list[dict[str, float]] = []
    while engine.has_unfinished_requests:
        clock.seconds.clear()
        deltas = step()
        if len(deltas) == num_streams and all(delta.new_token_ids and not delta.finish_reason for delta in deltas):
            rows.append(dict(clock.seconds))
    return rows[2:]


if __name__ == "__main__":
    main()

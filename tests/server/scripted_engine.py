"""An engine process whose model says what its prompt tells it to; all the rest is octavo's own engine.

Run as `python -m tests.server.scripted_engine` in place of `octavo.engine.process`. The output is what stands in the
prompt between `<say>` and the next `</s>` (or the end), then `</s>`; choice k says it k + 1 times. Without `<say>` the
prompt is repeated for ever. Other tokens in the prompt: `<slow>` lets each step take 20 ms, `<fail>` lets the third
step raise, `<nan>` fails the request at its third token, `<hang>` lets a step take a minute, in which with `<slow>` it
gets on and without does not.
"""

import os
import sys
import time
from collections.abc import Iterator
from itertools import chain, cycle, repeat
from pathlib import Path

from octavo.checkpoint.generation_config import resolve_sampling_defaults
from octavo.core.request import RequestLimits
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import NO_MASKS, ModelRunnerOutput, NewRequest, SchedulerOutput, TokenLogprobs, TokenMasks
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.process import main
from octavo.errors import ConfigError
from octavo.ipc.messages import EngineInfo
from octavo.options import EngineConfig
from octavo.resolve import KVConfig, ResolvedConfig, RuntimeConfig, WeightsConfig

SPECIAL_TOKENS = ["<s>", "</s>", "<say>", "<slow>", "<fail>", "<nan>", "<hang>"]
START, END, SAY, SLOW, FAIL, NAN, HANG = range(7)
START_VARIABLE = "OCTAVO_SCRIPTED_START"
"""In the environment: a file to wait for before the engine is ready, or "fail"."""
STEP_SECONDS = 0.02


class _Row:
    def __init__(self, new: NewRequest) -> None:
        self.prompt = new.prompt_token_ids
        self.num_candidates = new.num_candidates
        self.num_logprobs = new.num_candidates or new.sampling_params.logprobs
        self.num_prompt_logprobs = new.sampling_params.prompt_logprobs
        self.num_tokens = 0
        self._tokens = self._script(new.choice)

    def _script(self, choice: int) -> Iterator[int]:
        if SAY not in self.prompt:
            return cycle(self.prompt)
        said = self.prompt[len(self.prompt) - self.prompt[::-1].index(SAY) :]
        said = said[: said.index(END)] if END in said else said
        return chain(said * (choice + 1), repeat(END))

    def next(self) -> tuple[int, TokenLogprobs]:
        self.num_tokens += 1
        token_id = next(self._tokens)
        top = [(token_id, -0.5), (token_id + 1, -1.5), (token_id + 2, -2.5)]
        if self.num_candidates:
            others = [other for other in range(self.num_candidates) if other != token_id]
            top = [(token_id, -0.5), *((other, -1.5 - other) for other in others)]
        return token_id, TokenLogprobs(-0.5, 1, top[: self.num_logprobs or 0])

    def prompt_logprobs(self, start: int, end: int) -> list[TokenLogprobs]:
        """Of the tokens after these positions: the more unlikely, the later they stand, and `END` above them all."""
        positions = range(start, min(end, len(self.prompt) - 1))
        top = [(END, -0.125)][: self.num_prompt_logprobs]
        return [TokenLogprobs(-1.0 - position, 2 + position, top) for position in positions]


num_ops = 0
"""What a watcher sees of a step's progress."""


def _hang(gets_on: bool) -> None:
    global num_ops
    for _ in range(60):
        time.sleep(1)
        num_ops += gets_on


class _Handle:
    def __init__(self, rows: dict[int, _Row], step: SchedulerOutput) -> None:
        self._rows = rows
        self._step = step

    def result(self, masks: TokenMasks = NO_MASKS) -> ModelRunnerOutput:
        rows = [self._rows[request_id] for request_id in self._step.request_ids]
        if any(SLOW in row.prompt for row in rows):
            time.sleep(STEP_SECONDS)
        for row in rows:
            if HANG in row.prompt:
                _hang(SLOW in row.prompt)
        if any(FAIL in row.prompt and row.num_tokens == 2 for row in rows):
            raise RuntimeError("the device is on fire")
        output = ModelRunnerOutput([], [], [])
        for entry, row in zip(self._step.entries, rows, strict=True):
            request_id, start = entry.request_id, entry.first_position
            if row.num_prompt_logprobs is not None and start < len(row.prompt):
                entries = row.prompt_logprobs(start, start + entry.num_tokens)
                output.prompt_logprobs[request_id] = entries
            if not entry.num_logits:
                continue
            if NAN in row.prompt and row.num_tokens == 2:
                output.failed[request_id] = "NaN in the logits"
                continue
            token_id, logprobs = row.next()
            output.request_ids.append(request_id)
            output.sampled_token_ids.append([token_id])
            output.logprobs.append(None if row.num_logprobs is None else [logprobs])
        return output


class ScriptedExecutor:
    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def submit(self, scheduler_output: SchedulerOutput) -> _Handle:
        for request_id in scheduler_output.forgotten_request_ids:
            del self._rows[request_id]
        for new in scheduler_output.new_requests:
            self._rows[new.request_id] = _Row(new)
        return _Handle(self._rows, scheduler_output)


def build(config: EngineConfig) -> tuple[LLMEngine, EngineInfo]:
    start = os.environ.get(START_VARIABLE, "")
    if start == "fail":
        raise ConfigError("--max-model-len 9 is too much for this fake.")
    while start and not Path(start).exists():
        time.sleep(0.01)
    scheduler = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=256,
        num_blocks=32 * config.max_num_seqs,
        block_size=16,
        scheduling_policy="priority" if config.scheduling_policy == "priority" else "fcfs",
    )
    runtime = RuntimeConfig(
        max_model_len=config.max_model_len or 512,
        max_steps_in_flight=1,
        provider="script",
        num_threads=1,
        enforce_eager=False,
        pooling=None,
        sampling_defaults=resolve_sampling_defaults({}, "auto", config.override_generation_config),
    )
    weights = WeightsConfig(dtype="float32", quantization="none", int8_activations=False)
    kv = KVConfig(dtype="float32", folder="")
    info = EngineInfo(
        limits=RequestLimits(
            vocab_size=300, max_model_len=runtime.max_model_len, kv_capacity_tokens=scheduler.kv_capacity_tokens
        ),
        eos_token_ids=[END],
        config=ResolvedConfig(weights=weights, kv=kv, scheduler=scheduler, runtime=runtime),
        start_seconds={"learn the script": 0.01},
    )
    engine = LLMEngine(
        Scheduler(scheduler), ScriptedExecutor(), info.limits, frozenset({END}), progress=lambda: num_ops
    )
    return engine, info


if __name__ == "__main__":
    sys.exit(main(build))

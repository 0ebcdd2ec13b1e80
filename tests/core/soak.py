"""A long random load for the scheduler, over a device that is fast enough for it and still notices a wrong block.

Each block of the device holds a hash over the tokens that were written to it and to those before it, and its group. In
every step the blocks that each request reads are compared with what its own tokens give, so that one which is stale,
shared wrongly, copied wrongly or overwritten is noticed at the next step of whoever reads it.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from octavo.sampling_params import SamplingParams

END = 1
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 2_000, 500
BLOCK = 16
MAX_NUM_SEQS = 64
PARAMS = SamplingParams(max_tokens=MAX_OUTPUT_TOKENS)


def output_token(seed: int, index: int) -> int:
    """What a request samples: `seed` holds how long its output is, and END is its last token."""
    return END if index == seed % 1000 - 1 else 2 + (seed + index * 7919) % 30_000


@dataclass
class _Row:
    new: NewRequest
    token_ids: list[int]
    tables: list[list[int]]
    expected: list[list[int]]
    """What its full blocks hold."""


class StampExecutor:
    """Computes a step as it is asked for."""

    def __init__(self, num_blocks: int, windows: Sequence[int]) -> None:
        self.windows = windows
        self.stamps = [0] * num_blocks
        self.rows: dict[int, _Row] = {}

    def compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for source, destination in step.copies:
            self.stamps[destination] = self.stamps[source]
        for request_id in step.forgotten_request_ids:
            del self.rows[request_id]
        for new in step.new_requests:
            self.rows[new.request_id] = _Row(
                new, list(new.prompt_token_ids), [[] for _ in self.windows], [[] for _ in self.windows]
            )
        for request_id in step.reset_request_ids:
            for table in self.rows[request_id].tables:
                table.clear()
        result = ModelRunnerOutput([], [], [])
        for entry in step.entries:
            row, start = self.rows[entry.request_id], entry.first_position
            for group, block_ids in enumerate(entry.new_block_ids):
                row.tables[group] += block_ids
                self._write(row, group, start, start + entry.num_tokens)
            if entry.num_logits:
                row.token_ids.append(output_token(row.new.seed, len(row.token_ids) - len(row.new.prompt_token_ids)))
                result.request_ids.append(entry.request_id)
                result.sampled_token_ids.append(row.token_ids[-1:])
                result.logprobs.append(None)
        return result

    def _write(self, row: _Row, group: int, start: int, end: int) -> None:
        """Check that the blocks up to `start`, if they are seen, hold the request's tokens; write those up to `end`."""
        table, expected, stamps = row.tables[group], row.expected[group], self.stamps
        num_full, window = start // BLOCK, self.windows[group]
        while len(expected) < num_full:  # shared blocks that others wrote
            expected.append(self._stamp(row, group, len(expected), (len(expected) + 1) * BLOCK))
        first = max(start - window + 1, 0) // BLOCK if window else 0
        assert list(map(stamps.__getitem__, table[first:num_full])) == expected[first:num_full]
        if start % BLOCK:
            assert stamps[table[num_full]] == self._stamp(row, group, num_full, start)
        for block in range(num_full, -(-end // BLOCK)):
            stamp = self._stamp(row, group, block, min(end, (block + 1) * BLOCK))
            stamps[table[block]] = stamp
            if (block + 1) * BLOCK <= end and len(expected) == block:
                expected.append(stamp)

    def _stamp(self, row: _Row, group: int, block: int, end: int) -> int:
        return hash((row.expected[group][block - 1] if block else group, *row.token_ids[block * BLOCK : end]))


def log_uniform(draw: random.Random, most: int) -> int:
    """From 1 to `most`, as many from 1 to 10 as from 10 to 100."""
    return min(int(exp(draw.random() * log(most + 1))), most)


def make_requests(num_requests: int, seed: int) -> list[Request]:
    """Prompts of 1 to 2,000 tokens, outputs of 1 to 500, both log-uniform; a third begin with one of 20 long texts."""
    draw, nothing = random.Random(seed), frozenset[int]()
    texts = [draw.choices(range(2, 30_000), k=MAX_PROMPT_TOKENS) for _ in range(20)]
    requests = []
    for request_id in range(num_requests):
        num_tokens, num_output = log_uniform(draw, MAX_PROMPT_TOKENS), log_uniform(draw, MAX_OUTPUT_TOKENS)
        num_shared = draw.randrange(num_tokens) if draw.random() < 1 / 3 else 0
        own = [draw.randrange(2, 30_000)] * (num_tokens - num_shared)
        prompt = draw.choice(texts)[:num_shared] + own
        draw_seed = draw.randrange(1_000_000) * 1000 + num_output
        priority = draw.randrange(3)
        requests.append(
            Request(request_id, prompt, PARAMS, MAX_OUTPUT_TOKENS, nothing, frozenset({END}), draw_seed, 0, priority)
        )
    return requests


def peak_blocks(requests: list[Request]) -> int:
    """Blocks that MAX_NUM_SEQS of the requests need at once, when those that need most meet, without sharing."""
    needs = sorted(-(-(r.num_prompt_tokens + r.seed % 1000 - 1) // BLOCK) for r in requests)
    return sum(needs[-MAX_NUM_SEQS:])


def soak(
    num_requests: int, num_steps_in_flight: int = 1, seed: int = 0, num_blocks: int = 0, **options: Any
) -> Scheduler:
    """Serve the requests with a pool of a fifth of the peak need or of `num_blocks`; a tenth of them are aborted at
    some moment. Every invariant is checked after every step, every output at its end."""
    draw, requests = random.Random(seed), make_requests(num_requests, seed)
    num_blocks = num_blocks or max(peak_blocks(requests) // 5, -(-(MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS) // BLOCK))
    config = SchedulerConfig(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        num_blocks=num_blocks,
        block_size=BLOCK,
        **options,
    )
    scheduler, executor = Scheduler(config), StampExecutor(num_blocks + config.num_swap_blocks, config.group_windows)
    arriving = deque(requests)
    # When each of a tenth is aborted: at so many output tokens, or, with -1, while it waits.
    doomed = {r.request_id: draw.randrange(-1, r.seed % 1000) for r in requests if draw.random() < 0.1}
    in_flight: deque[SchedulerOutput] = deque()
    while arriving or scheduler.has_unfinished_requests or in_flight:
        while arriving and scheduler.stats().num_waiting < MAX_NUM_SEQS:
            request = arriving.popleft()
            scheduler.add_request(request)
            if doomed.get(request.request_id) == -1:
                scheduler.abort(request.request_id)
        while len(in_flight) < num_steps_in_flight and not (step := scheduler.schedule()).is_empty:
            in_flight.append(step)
        if in_flight:
            step = in_flight.popleft()
            scheduler.update(step, executor.compute(step))
            for request_id in doomed.keys() & step.request_ids:
                if requests[request_id].num_output_tokens >= doomed[request_id]:
                    scheduler.abort(request_id)
        scheduler.check()
    for request in requests:
        output = [output_token(request.seed, index) for index in range(request.num_output_tokens)]
        assert request.output_token_ids == output
        assert request.finish_reason == "abort" or len(output) == request.seed % 1000
    return scheduler

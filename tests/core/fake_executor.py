"""A device in thirty lines: it keeps a KV cache, reads it through the block tables, and samples what it read.

A slot's content depends on its group, its token and the slot before it, and a sampled token on every slot that the
groups' windows show, so a block that is stale, shared wrongly, overwritten or freed too early changes the output.
`naive_output` says what a request alone gives.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.core.beam_search import BeamSearch
from octavo.core.request import Request
from octavo.core.step import (
    NO_MASKS,
    ModelRunnerOutput,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
    TokenMasks,
)
from octavo.sampling_params import SamplingParams

VOCAB_SIZE = 40
_MASK = (1 << 61) - 1


def _mix(state: int, value: int) -> int:
    return (state * 6364136223846793005 + value * 1442695040888963407 + 1013904223) & _MASK


def _sample(slots: Iterable[int], seed: int, choice: int) -> int:
    state = _mix(seed, choice)
    for slot in slots:
        state = _mix(state, slot)
    return (state >> 24) % VOCAB_SIZE


def candidates(slots: Sequence[int], num_candidates: int) -> TokenLogprobs:
    """What a beam reports, most likely first: all the same tokens with log-probabilities of their own."""
    scores = sorted((-(_sample(slots, 1, token) + 1) / 8 - token / 1000, token) for token in range(VOCAB_SIZE))[::-1]
    return TokenLogprobs(scores[0][0], 1, [(token, logprob) for logprob, token in scores[:num_candidates]])


def contents(token_ids: Sequence[int], group: int = 0) -> list[int]:
    """The slots of a sequence."""
    slots, content = [], group
    for token in token_ids:
        content = _mix(content, token)
        slots.append(content)
    return slots


def naive_output(request: Request, windows: Sequence[int] = (0,)) -> list[int]:
    """The request's output when it runs alone on an unbounded cache. A window shows at least two positions."""
    params, tokens, output = request.sampling_params, list(request.prompt_token_ids), list[int]()
    while len(output) < request.max_tokens:
        output.append(_sample(_seen(tokens, windows), request.seed, request.choice))
        tokens.append(output[-1])
        if output[-1] in request.stop_token_ids and len(output) >= params.min_tokens:
            break
    return output


def _seen(token_ids: Sequence[int], windows: Sequence[int]) -> list[int]:
    """The slots that the last token sees."""
    return [slot for group, window in enumerate(windows) for slot in contents(token_ids, group)[-window:]]


def naive_beams(
    prompt: list[int], params: SamplingParams, eos: frozenset[int], windows: Sequence[int] = (0,)
) -> list[list[int]]:
    """The outputs of a beam search by itself, best first."""
    assert params.beam_search is not None
    assert params.max_tokens is not None
    search = BeamSearch(params.n, params.beam_search, params.max_tokens, eos)
    while not search.is_done:
        search.advance([candidates(_seen(prompt + beam.token_ids, windows), VOCAB_SIZE) for beam in search.beams])
    return [hypothesis.beam.token_ids for hypothesis in search.hypotheses]


@dataclass
class _Row:
    new: NewRequest
    token_ids: list[int]
    tables: list[list[int]] = field(default_factory=list)


class FakeStepHandle:
    """Computes its step when the result is asked for: as late as can be, in the order of submission."""

    def __init__(self, executor: "FakeExecutor", step: SchedulerOutput) -> None:
        self._executor = executor
        self._step = step

    def result(self, masks: TokenMasks = NO_MASKS) -> ModelRunnerOutput:
        self._executor.masks.append(masks)
        return self._executor.compute(self._step)


class FakeExecutor:
    """Steps named in `failing_step_ids` leave garbage in the slots they were to write, and raise; requests named in
    `failing_request_ids` come back as failed when they are to be sampled; copies in steps of `failing_copy_step_ids`
    leave garbage too, if the tier has a part in them."""

    def __init__(
        self, num_blocks: int, block_size: int, windows: Sequence[int] = (0,), num_swap_blocks: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.kv_cache = np.full((num_blocks + num_swap_blocks) * block_size, -1, dtype=np.int64)
        self.rows: dict[int, _Row] = {}
        self.steps: list[SchedulerOutput] = []
        self.masks: list[TokenMasks] = []
        """What each step was handed."""
        self.inputs: list[dict[int, list[int]]] = []
        """The tokens that each step has computed, by request."""
        self.failing_step_ids: set[int] = set()
        self.failing_request_ids: set[int] = set()
        self.failing_copy_step_ids: set[int] = set()

    def submit(self, scheduler_output: SchedulerOutput) -> FakeStepHandle:
        self.steps.append(scheduler_output)
        return FakeStepHandle(self, scheduler_output)

    def compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.forgotten_request_ids:
            self.rows.pop(request_id, None)  # never seen, when the step that brought it failed
        for new in step.new_requests:
            self.rows[new.request_id] = _Row(new, list(new.prompt_token_ids), [[] for _ in self.windows])
        for request_id in step.reset_request_ids:
            for table in self.rows[request_id].tables:
                table.clear()
        for given in step.given_tokens:
            self.rows[given.request_id].token_ids[given.position :] = given.token_ids
        result = ModelRunnerOutput([], [], [])
        fails = step.step_id in self.failing_step_ids
        blocks = self.kv_cache.reshape(-1, self.block_size)
        for index, (source, destination) in enumerate(step.copies):
            blocks[destination] = blocks[source]
            if fails or (step.step_id in self.failing_copy_step_ids and max(source, destination) >= self.num_blocks):
                blocks[destination] = -1
                result.failed_copies.append(index)
        self.inputs.append({entry.request_id: self._input_ids(entry) for entry in step.entries})
        for entry in step.entries:
            request_id, start, end = entry.request_id, entry.first_position, entry.first_position + entry.num_tokens
            row = self.rows[request_id]
            slots_of_groups = []
            for group in range(len(self.windows)):
                row.tables[group] += entry.new_block_ids[group] if entry.new_block_ids else []
                slots = self._slots(row.tables[group], end)
                self._write(row.token_ids, slots, start, group, fails)
                slots_of_groups.append(slots)
            if fails or not entry.num_logits:
                continue
            if request_id in self.failing_request_ids:
                result.failed[request_id] = "NaN in the logits"
                continue
            accepted: list[int] = []
            for position in range(end - entry.num_logits, end):
                if accepted and row.token_ids[position] != accepted[-1]:
                    break  # a draft that is not what was sampled there
                slots_and_windows = zip(slots_of_groups, self.windows, strict=True)
                seen = np.concatenate([slots[: position + 1][-window:] for slots, window in slots_and_windows])
                content = self.kv_cache[seen].tolist()
                accepted.append(_sample(content, row.new.seed, row.new.choice))
            row.token_ids[end - entry.num_logits + 1 :] = accepted
            result.request_ids.append(request_id)
            result.sampled_token_ids.append(accepted)
            result.logprobs.append([candidates(content, row.new.num_candidates)] if row.new.num_candidates else None)
        if fails:
            raise RuntimeError("the device is on fire")
        return result

    def _input_ids(self, entry: ScheduledRequest) -> list[int]:
        return self.rows[entry.request_id].token_ids[entry.first_position : entry.first_position + entry.num_tokens]

    def _slots(self, block_ids: Sequence[int], num_tokens: int) -> np.ndarray:
        positions = np.arange(num_tokens)
        return np.asarray(block_ids)[positions // self.block_size] * self.block_size + positions % self.block_size

    def _write(self, token_ids: Sequence[int], slots: np.ndarray, start: int, group: int, fails: bool) -> None:
        content = int(self.kv_cache[slots[start - 1]]) if start else group
        for position in range(start, len(slots)):
            token_id = token_ids[position] if position < len(token_ids) else 0  # absent after a failed step
            content = -1 if fails else _mix(content, token_id)
            self.kv_cache[slots[position]] = content

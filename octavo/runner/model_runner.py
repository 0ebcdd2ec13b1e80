"""ModelRunner: a SchedulerOutput in, a ModelRunnerOutput out. Owns the model, the KV pool and each request's tokens.

Knows nothing of queues, budgets or why a request is in the step.
"""

import math
import time

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from octavo.checkpoint.model_config import ModelConfig
from octavo.core.step import ModelRunnerOutput, SchedulerOutput, TokenLogprobs, TokenMasks
from octavo.kernels.ops import Ops
from octavo.kernels.sampling import NOT_FINITE
from octavo.kernels.step_inputs import StepArrays, StepInputs
from octavo.models.loader import CausalLM
from octavo.resolve import ResolvedConfig
from octavo.runner.capture import make_forward
from octavo.runner.input_batch import InputBatch
from octavo.runner.kv_cache import allocate_kv_caches, copy_blocks, make_tier_file
from octavo.runner.logprobs import PromptLogprobs
from octavo.runner.sampler import FAILURES, SampledTokens, Sampler
from octavo.runner.tier_file import CopyResult

__all__ = ["ModelRunner"]

NOTHING_COPIED = CopyResult([], 0.0)


class _Begun(Struct, frozen=True, gc=False):
    """A step that waits for its masks, computed up to its logits."""

    request_ids: list[int]
    """Those that sample, in order."""
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    copied: CopyResult
    compute_s: float


class ModelRunner:
    """Invariant: `_constrained` has the requests known here whose tokens are sampled under masks; `_begun` is there
    from a `begin` that returned nothing to its `finish`."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        config: ResolvedConfig,
        model_config: ModelConfig,
        device: torch.device,
    ) -> None:
        limits = config.scheduler
        self.num_blocks = limits.num_blocks
        self.tier = make_tier_file(ops, model_config, config)
        self.kv_caches = allocate_kv_caches(
            ops, model_config, limits.num_blocks, limits.block_size, config.kv.dtype, device, self.tier
        )
        max_blocks = -(-config.runtime.max_model_len // limits.block_size) + 1
        arrays = StepArrays.make(
            limits.max_num_batched_tokens, limits.max_num_seqs, len(limits.group_windows), max_blocks
        )
        self.forward = make_forward(model, ops, config, self.kv_caches, device, arrays)
        self.batch = InputBatch(ops, arrays, config.runtime.max_model_len, limits.block_size)
        self.sampler = Sampler(model_config.vocab_size, ops, arrays.draws)
        self.prompt_logprobs = PromptLogprobs()
        self._constrained: set[int] = set()
        self._begun: _Begun | None = None

    def begin(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Compute one step; None where it waits for `finish`. Steps come in the order in which they were scheduled."""
        self._update_requests(step)
        copied = self._copy(step.copies) if step.copies else NOTHING_COPIED
        start = time.perf_counter()
        if not step.entries:
            return ModelRunnerOutput([], [], [], failed_copies=copied.failed, copy_s=copied.seconds)
        inputs, rows = self.batch.prepare(step)
        if self.tier is not None:
            self.tier.populate(_blocks_read(inputs, self.batch.block_size))
        request_ids = [entry.request_id for entry in step.entries if entry.num_logits]
        if len(request_ids) < len(rows):
            rows = [row for row, entry in zip(rows, step.entries, strict=True) if entry.num_logits]
        draw = self.sampler.prepare(rows)
        waits = bool(self._constrained) and not self._constrained.isdisjoint(request_ids)
        if waits:
            draw = "no"
        self.forward.run(inputs, draw)  # what comes before it is in the caches, what comes after is not
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        if self.prompt_logprobs.are_wanted:
            prompt_logprobs = self.prompt_logprobs.compute(step, inputs, self.forward.logits)
        if waits:
            self._begun = _Begun(request_ids, prompt_logprobs, copied, time.perf_counter() - start)
            return None
        if draw == "no":
            sampled = self.sampler.sample(self.forward.sampled_logits())
            self.batch.append()
        else:
            sampled = self.sampler.drawn(*self.batch.append())
        return _output(request_ids, sampled, prompt_logprobs, copied, time.perf_counter() - start)

    def finish(self, masks: TokenMasks) -> ModelRunnerOutput:
        """Sample for the step that `begin` left at its logits."""
        assert self._begun is not None
        begun, self._begun = self._begun, None
        start = time.perf_counter()
        of_rows = {i: masks[request_id][0] for i, request_id in enumerate(begun.request_ids) if masks.get(request_id)}
        sampled = self.sampler.sample(self.forward.sampled_logits(), of_rows)
        self.batch.append()
        compute_s = begun.compute_s + time.perf_counter() - start
        return _output(begun.request_ids, sampled, begun.prompt_logprobs, begun.copied, compute_s)

    def _copy(self, copies: list[tuple[int, int]]) -> CopyResult:
        """Those between pool and tier, then those within the pool."""
        within = [copy for copy in copies if max(copy) < self.num_blocks]
        between = copies[: len(copies) - len(within)]
        copied = self.tier.copy(between) if self.tier is not None else NOTHING_COPIED
        copy_blocks(self.kv_caches, within)
        return copied

    def forget(self, request_ids: list[int]) -> None:
        """Drop all state of requests that are finished."""
        for request_id in request_ids:
            self._constrained.discard(request_id)
            row = self.batch.remove(request_id)
            if row is not None:
                self.sampler.remove(row)
                self.prompt_logprobs.remove(row)

    def _update_requests(self, step: SchedulerOutput) -> None:
        if step.forgotten_request_ids:
            self.forget(step.forgotten_request_ids)
        for request in step.new_requests:
            row = self.batch.add(request.request_id, request.prompt_token_ids)
            self.sampler.add(row, request)
            self.prompt_logprobs.add(row, request)
            if request.sampling_params.structured_outputs is not None:
                self._constrained.add(request.request_id)
        self.batch.apply(step)


def _output(
    request_ids: list[int],
    sampled: SampledTokens,
    prompt_logprobs: dict[int, list[TokenLogprobs]],
    copied: CopyResult,
    compute_s: float,
) -> ModelRunnerOutput:
    token_ids, logprobs, failed = sampled.token_ids, sampled.logprobs, {}
    if sampled.failed:
        failed = {request_ids[i]: message for i, message in sampled.failed.items()}
    if prompt_logprobs:
        failed |= {i: FAILURES[NOT_FINITE] for i, entries in prompt_logprobs.items() if _has_nan(entries)}
        prompt_logprobs = {i: entries for i, entries in prompt_logprobs.items() if i not in failed}
    if failed:
        good = [i for i, request_id in enumerate(request_ids) if request_id not in failed]
        token_ids, logprobs = [token_ids[i] for i in good], [logprobs[i] for i in good]
        request_ids = [request_ids[i] for i in good]
    return ModelRunnerOutput(
        request_ids=request_ids,
        sampled_token_ids=[[token_id] for token_id in token_ids],
        logprobs=[None if entry is None else [entry] for entry in logprobs],
        failed=failed,
        prompt_logprobs=prompt_logprobs,
        failed_copies=copied.failed,
        copy_s=copied.seconds,
        compute_s=compute_s,
    )


def _blocks_read(inputs: StepInputs, block_size: int) -> npt.NDArray[np.int32]:
    """Ids of the blocks that the step's attention reads."""
    tables = np.stack(inputs.block_tables)
    return tables[:, np.arange(tables.shape[2]) * block_size < inputs.seq_lens[:, None]]


def _has_nan(entries: list[TokenLogprobs]) -> bool:
    return any(math.isnan(entry.logprob) for entry in entries)

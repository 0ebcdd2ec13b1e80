"""ModelRunner: a SchedulerOutput in, a ModelRunnerOutput out. Owns the model, the KV pool and each request's tokens.

Knows nothing of queues, budgets or why a request is in the step, and no device by name.
"""

import time

import torch
from msgspec import Struct

from octavo.checkpoint.model_config import ModelConfig
from octavo.core.step import ModelRunnerOutput, SchedulerOutput, TokenLogprobs, TokenMasks
from octavo.devices.device import FAILURES, CopyResult, Device, KVLayout, SampledTokens, StepRoom
from octavo.kernels.sampling import NOT_FINITE, NOTHING_LEFT
from octavo.models.loader import CausalLM
from octavo.runner.input_batch import InputBatch
from octavo.runner.kv_cache import layer_caches
from octavo.runner.logprobs import PromptLogprobs, has_nan
from octavo.runner.model_calls import ContextCalls

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
        model_config: ModelConfig,
        device: Device,
        dtype: torch.dtype,
        room: StepRoom,
        kv_layout: KVLayout,
        eager: bool = False,
    ) -> None:
        """dtype: of activations. eager: whether the device calls the model op by op in each step."""
        self.kv_pool = device.make_kv_pool(kv_layout)
        caches = layer_caches(model_config, self.kv_pool.caches)
        buffers = device.make_step_buffers(room)
        calls = ContextCalls(model, device.ops, dtype, caches, has_logits=True)
        self.forward = device.capture(calls, buffers, self.kv_pool, eager)
        self.batch = InputBatch(buffers)
        self.sampler = device.make_sampler(room.vocab_size, buffers)
        self.prompt_logprobs = PromptLogprobs(self.forward, self.sampler)
        self._constrained: set[int] = set()
        self._begun: _Begun | None = None

    def begin(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Compute one step; None where it waits for `finish`. Steps come in the order in which they were scheduled."""
        self._update_requests(step)
        copied = self.kv_pool.copy(step.copies) if step.copies else NOTHING_COPIED
        start, entries = time.perf_counter(), step.entries
        if not entries:
            return ModelRunnerOutput([], [], [], failed_copies=copied.failed, copy_s=copied.seconds)
        size, rows = self.batch.fill(entries)
        request_ids, num_logits = step.request_ids, [entry.num_logits for entry in entries]
        if 0 in num_logits:
            sampling = [i for i, num in enumerate(num_logits) if num]
            request_ids, rows, num_logits = ([of[i] for i in sampling] for of in (request_ids, rows, num_logits))
        draw = self.sampler.prepare(rows, num_logits)
        waits = bool(self._constrained) and not self._constrained.isdisjoint(request_ids)
        if waits:
            draw = "no"
        self.forward.run(size, draw)  # what comes before it is in the caches, what comes after is not
        prompt_logprobs = self.prompt_logprobs.compute(entries)
        if waits:
            self._begun = _Begun(request_ids, prompt_logprobs, copied, time.perf_counter() - start)
            return None
        sampled = self.sampler.sample(self.forward.sampled_logits(), {}) if draw == "no" else self.sampler.drawn()
        return _output(request_ids, sampled, prompt_logprobs, copied, time.perf_counter() - start)

    def finish(self, masks: TokenMasks) -> ModelRunnerOutput:
        """Sample for the step that `begin` left at its logits."""
        assert self._begun is not None
        begun, self._begun = self._begun, None
        start = time.perf_counter()
        by_index = {i: masks[request_id] for i, request_id in enumerate(begun.request_ids) if masks.get(request_id)}
        sampled = self.sampler.sample(self.forward.sampled_logits(), by_index)
        compute_s = begun.compute_s + time.perf_counter() - start
        return _output(begun.request_ids, sampled, begun.prompt_logprobs, begun.copied, compute_s)

    def forget(self, request_ids: list[int]) -> None:
        """Drop all state of requests that are finished."""
        for request_id in request_ids:
            self._constrained.discard(request_id)
            self.prompt_logprobs.remove(request_id)
            row = self.batch.remove(request_id)
            if row is not None:
                self.sampler.remove(row)

    def _update_requests(self, step: SchedulerOutput) -> None:
        if step.forgotten_request_ids:
            self.forget(step.forgotten_request_ids)
        for request in step.new_requests:
            self.sampler.add(self.batch.add(request), request)
            self.prompt_logprobs.add(request)
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
    unsatisfiable: list[int] = []
    if sampled.failed:
        failed = {request_ids[i]: message for i, message in sampled.failed.items()}
        unsatisfiable = [request_ids[i] for i, message in sampled.failed.items() if message == FAILURES[NOTHING_LEFT]]
    if prompt_logprobs:
        failed |= {i: FAILURES[NOT_FINITE] for i, entries in prompt_logprobs.items() if has_nan(entries)}
        prompt_logprobs = {i: entries for i, entries in prompt_logprobs.items() if i not in failed}
    if failed:
        good = [i for i, request_id in enumerate(request_ids) if request_id not in failed]
        token_ids, logprobs = [token_ids[i] for i in good], [logprobs[i] for i in good]
        request_ids = [request_ids[i] for i in good]
    return ModelRunnerOutput(
        request_ids=request_ids,
        sampled_token_ids=token_ids,
        logprobs=logprobs,
        failed=failed,
        unsatisfiable=unsatisfiable,
        prompt_logprobs=prompt_logprobs,
        failed_copies=copied.failed,
        copy_s=copied.seconds,
        compute_s=compute_s,
    )

"""ModelRunner: a SchedulerOutput in, a ModelRunnerOutput out. Owns the model, the KV pool and each request's tokens.

Knows nothing of queues, budgets or why a request is in the step.
"""

import numpy as np
import numpy.typing as npt
import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.config import ResolvedConfig
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.kernels.ops import Ops
from octavo.layers.context import StepContext
from octavo.models.loader import CausalLM
from octavo.runner.input_batch import InputBatch, StepInputs
from octavo.runner.kv_cache import allocate_kv_caches
from octavo.runner.sampler import SampledTokens, Sampler

__all__ = ["ModelRunner"]


class ModelRunner:
    def __init__(
        self, model: CausalLM, ops: Ops, config: ResolvedConfig, model_config: ModelConfig, device: torch.device
    ) -> None:
        self.model = model
        self.ops = ops
        self.device = device
        self.dtype = getattr(torch, config.dtype)
        self.kv_caches = allocate_kv_caches(
            ops, model_config, config.num_blocks, config.block_size, getattr(torch, config.kv_cache_dtype), device
        )
        self.batch = InputBatch(config.max_num_seqs, config.max_model_len, config.block_size)
        self.sampler = Sampler(model_config.vocab_size)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. Steps are executed in the order in which they were scheduled."""
        self._update_requests(step)
        inputs = self.batch.prepare(step)
        ctx = self._context(inputs)
        hidden_states = self.model(self._to_device(inputs.input_ids), ctx)
        logits = self.model.logits(hidden_states, self._to_device(inputs.logits_rows), ctx)
        rows = inputs.rows[inputs.sampled].tolist()
        sampled = self.sampler.sample(logits.cpu().numpy(), rows, inputs.seq_lens[inputs.sampled])
        self.batch.append(inputs, sampled.token_ids)
        return _output([step.request_ids[i] for i in inputs.sampled], sampled)

    def forget(self, request_ids: list[int]) -> None:
        """Drop all state of requests that are finished."""
        for request_id in request_ids:
            row = self.batch.remove(request_id)
            if row is not None:
                self.sampler.remove(row)

    def _update_requests(self, step: SchedulerOutput) -> None:
        self.forget(step.finished_request_ids)
        for request in step.new_requests:
            row = self.batch.add(request.request_id, request.prompt_token_ids)
            self.sampler.add(row, request)
        self.batch.apply(step)

    def _context(self, inputs: StepInputs) -> StepContext:
        return StepContext(
            ops=self.ops,
            dtype=self.dtype,
            positions=self._to_device(inputs.positions),
            slot_mapping=self._to_device(inputs.slot_mapping),
            block_table=self._to_device(inputs.block_table),
            query_start=self._to_device(inputs.query_start),
            seq_lens=self._to_device(inputs.seq_lens),
            kv_caches=self.kv_caches,
        )

    def _to_device(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _output(request_ids: list[int], sampled: SampledTokens) -> ModelRunnerOutput:
    failed = {
        request_id: "The model's logits are not finite: the computation overflowed or the weights are damaged."
        for request_id, bad in zip(request_ids, sampled.failed.tolist(), strict=True)
        if bad
    }
    good = [i for i, request_id in enumerate(request_ids) if request_id not in failed]
    logprobs = [sampled.logprobs[i] for i in good]
    return ModelRunnerOutput(
        request_ids=[request_ids[i] for i in good],
        sampled_token_ids=[[token_id] for token_id in sampled.token_ids[good].tolist()],
        logprobs=[None if entry is None else [entry] for entry in logprobs],
        failed=failed,
    )

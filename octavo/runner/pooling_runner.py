"""Runners that turn prompts into embeddings: EncoderRunner in one step each, DecoderPoolingRunner over the paged cache.

They know nothing of queues, budgets or texts.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.core.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from octavo.kernels.ops import Ops
from octavo.kernels.step_inputs import StepArrays, StepInputs
from octavo.layers.pooling import Pooling
from octavo.models.loader import CausalLM, Encoder
from octavo.resolve import ResolvedConfig
from octavo.runner.capture import make_forward
from octavo.runner.model_runner import ModelRunner

__all__ = ["DecoderPoolingRunner", "EncoderRunner"]

NOT_FINITE = "The embedding is not finite: the computation overflowed or the weights are damaged."


class EncoderRunner:
    """Keeps nothing between steps: every request of a step is new in it, and whole."""

    def __init__(self, model: Encoder, ops: Ops, config: ResolvedConfig, device: torch.device) -> None:
        assert config.runtime.pooling is not None
        self.ops = ops
        self.device = device
        self.arrays = StepArrays.make(
            config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs, num_groups=0, num_blocks=0
        )
        self.forward = make_forward(model, ops, config, [], device, self.arrays)
        self.pooling = Pooling(config.runtime.pooling)

    @torch.inference_mode()
    def begin(self, step: SchedulerOutput) -> ModelRunnerOutput:
        prompts = [request.prompt_token_ids for request in step.new_requests]
        assert [entry.num_tokens for entry in step.entries] == list(map(len, prompts))
        assert not step.copies
        inputs = _whole_prompts(prompts, self.pooling.config.mode, self.arrays)
        self.forward.run(inputs)
        return _embeddings(step.request_ids, self.forward.hidden_states(), inputs, self.pooling, self.ops, self.device)

    def finish(self, masks: TokenMasks) -> ModelRunnerOutput:
        raise AssertionError("no step samples")

    def forget(self, request_ids: list[int]) -> None:
        """Nothing is kept."""


class DecoderPoolingRunner(ModelRunner):
    """A ModelRunner that pools a prompt's last token where another would sample the next one."""

    def __init__(
        self, model: CausalLM, ops: Ops, config: ResolvedConfig, model_config: ModelConfig, device: torch.device
    ) -> None:
        super().__init__(model, ops, config, model_config, device)
        assert config.runtime.pooling is not None
        assert config.runtime.pooling.mode == "last"
        self.ops = ops
        self.device = device
        self.pooling = Pooling(config.runtime.pooling)

    @torch.inference_mode()
    def begin(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._update_requests(step)
        assert not step.copies  # there is no tier, and no request forks
        inputs, _ = self.batch.prepare(step)
        self.forward.run(inputs)
        request_ids = [entry.request_id for entry in step.entries if entry.num_logits]
        return _embeddings(request_ids, self.forward.hidden_states(), inputs, self.pooling, self.ops, self.device)


def _whole_prompts(prompts: Sequence[Sequence[int]], mode: str, arrays: StepArrays) -> StepInputs:
    """Inputs of a step that reads no cache. The tokens chosen for pooling are the first ones, or the last."""
    lengths, num_requests = [len(prompt) for prompt in prompts], len(prompts)
    inputs = StepInputs(arrays, sum(lengths), num_requests, num_sampled=num_requests, num_blocks=0)
    inputs.seq_lens[:] = lengths
    query_start = inputs.query_start
    np.cumsum(lengths, out=query_start[1:])
    inputs.input_ids[:] = list(chain.from_iterable(prompts))
    inputs.positions[:] = np.arange(inputs.num_tokens) - np.repeat(query_start[:-1], lengths)
    inputs.logits_rows[:] = query_start[:-1] if mode == "cls" else query_start[1:] - 1
    return inputs


def _embeddings(
    request_ids: Sequence[int],
    hidden_states: torch.Tensor,
    inputs: StepInputs,
    pooling: Pooling,
    ops: Ops,
    device: torch.device,
) -> ModelRunnerOutput:
    """hidden_states [T, H] -> one row a request."""
    rows, query_start = (torch.from_numpy(array).to(device) for array in (inputs.logits_rows, inputs.query_start))
    pooled = pooling(hidden_states, rows, query_start, ops).float().cpu().numpy()
    output = ModelRunnerOutput([], [], [])
    for request_id, row, is_finite in zip(request_ids, pooled, np.isfinite(pooled).all(axis=-1), strict=True):
        if is_finite:
            output.embeddings[request_id] = row.astype("<f4").tobytes()
        else:
            output.failed[request_id] = NOT_FINITE
    return output

"""Runners that turn prompts into embeddings: EncoderRunner in one step each, DecoderPoolingRunner over the paged cache.

They know nothing of queues, budgets or texts.
"""

from collections.abc import Sequence

import numpy as np
import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.config import ResolvedConfig
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.kernels.ops import Ops
from octavo.layers.pooling import Pooling
from octavo.models.loader import CausalLM, Encoder
from octavo.runner.capture import make_forward
from octavo.runner.input_batch import StepInputs
from octavo.runner.model_runner import ModelRunner

__all__ = ["DecoderPoolingRunner", "EncoderRunner"]

NOT_FINITE = "The embedding is not finite: the computation overflowed or the weights are damaged."


class EncoderRunner:
    """Keeps nothing between steps: every request of a step is new in it, and whole."""

    def __init__(self, model: Encoder, ops: Ops, config: ResolvedConfig, device: torch.device) -> None:
        assert config.pooling is not None
        self.ops = ops
        self.device = device
        self.forward = make_forward(model, ops, config, [], device)
        self.pooling = Pooling(config.pooling)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        prompts = [request.prompt_token_ids for request in step.new_requests]
        assert step.num_scheduled_tokens == list(map(len, prompts))
        inputs = _whole_prompts(prompts, self.pooling.config.mode)
        self.forward.run(inputs)
        return _embeddings(step.request_ids, self.forward.hidden_states(), inputs, self.pooling, self.ops, self.device)

    def forget(self, request_ids: list[int]) -> None:
        """Nothing is kept."""


class DecoderPoolingRunner(ModelRunner):
    """A ModelRunner that pools a prompt's last token where another would sample the next one."""

    def __init__(
        self, model: CausalLM, ops: Ops, config: ResolvedConfig, model_config: ModelConfig, device: torch.device
    ) -> None:
        super().__init__(model, ops, config, model_config, device)
        assert config.pooling is not None
        assert config.pooling.mode == "last"
        self.ops = ops
        self.device = device
        self.pooling = Pooling(config.pooling)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._update_requests(step)
        inputs = self.batch.prepare(step)
        self.forward.run(inputs)
        request_ids = [step.request_ids[i] for i in inputs.sampled]
        return _embeddings(request_ids, self.forward.hidden_states(), inputs, self.pooling, self.ops, self.device)


def _whole_prompts(prompts: Sequence[Sequence[int]], mode: str) -> StepInputs:
    """Inputs of a step that reads no cache. The tokens chosen for pooling are the first ones, or the last."""
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
    query_start = np.zeros(len(prompts) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_start[1:])
    return StepInputs(
        rows=np.arange(len(prompts)),
        input_ids=np.concatenate([np.array(prompt, dtype=np.int32) for prompt in prompts]),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        slot_mappings=[],
        block_tables=[],
        query_start=query_start,
        seq_lens=lengths,
        sampled=np.arange(len(prompts)),
        logits_rows=query_start[:-1] if mode == "cls" else query_start[1:] - 1,
    )


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

"""Runners that turn prompts into embeddings: EncoderRunner in one step each, DecoderPoolingRunner over the paged cache.

They know nothing of queues, budgets or texts.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.config import ResolvedConfig
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.kernels.ops import Ops
from octavo.layers.context import StepContext
from octavo.layers.pooling import Pooling
from octavo.models.loader import CausalLM, Encoder
from octavo.runner.model_runner import ModelRunner

__all__ = ["DecoderPoolingRunner", "EncoderRunner"]

NOT_FINITE = "The embedding is not finite: the computation overflowed or the weights are damaged."


class EncoderRunner:
    """Keeps nothing between steps: every request of a step is new in it, and whole."""

    def __init__(self, model: Encoder, ops: Ops, config: ResolvedConfig, device: torch.device) -> None:
        assert config.pooling is not None
        self.model = model
        self.ops = ops
        self.device = device
        self.dtype = getattr(torch, config.dtype)
        self.pooling = Pooling(config.pooling)
        self._nothing = torch.empty(0, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        prompts = [request.prompt_token_ids for request in step.new_requests]
        assert step.num_scheduled_tokens == list(map(len, prompts))
        query_start = np.zeros(len(prompts) + 1, dtype=np.int32)
        np.cumsum(step.num_scheduled_tokens, out=query_start[1:])
        input_ids = np.concatenate([np.array(prompt, dtype=np.int32) for prompt in prompts])
        positions = np.concatenate([np.arange(count, dtype=np.int32) for count in step.num_scheduled_tokens])
        rows = query_start[:-1] if self.pooling.config.mode == "cls" else query_start[1:] - 1
        ctx = self._context(positions, query_start)
        hidden_states = self.model(self._to_device(input_ids), ctx)
        return embeddings_output(step.request_ids, self.pooling(hidden_states, self._to_device(rows), ctx))

    def forget(self, request_ids: list[int]) -> None:
        """Nothing is kept."""

    def _context(self, positions: npt.NDArray[np.int32], query_start: npt.NDArray[np.int32]) -> StepContext:
        return StepContext(
            ops=self.ops,
            dtype=self.dtype,
            positions=self._to_device(positions),
            slot_mapping=self._nothing,
            block_table=self._nothing,
            query_start=self._to_device(query_start),
            seq_lens=self._nothing,
            kv_caches=[],
        )

    def _to_device(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


class DecoderPoolingRunner(ModelRunner):
    """A ModelRunner that pools a prompt's last token where another would sample the next one."""

    def __init__(
        self, model: CausalLM, ops: Ops, config: ResolvedConfig, model_config: ModelConfig, device: torch.device
    ) -> None:
        super().__init__(model, ops, config, model_config, device)
        assert config.pooling is not None
        assert config.pooling.mode == "last"
        self.pooling = Pooling(config.pooling)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._update_requests(step)
        inputs = self.batch.prepare(step)
        ctx = self._context(inputs)
        hidden_states = self.model(self._to_device(inputs.input_ids), ctx)
        pooled = self.pooling(hidden_states, self._to_device(inputs.logits_rows), ctx)
        return embeddings_output([step.request_ids[i] for i in inputs.sampled], pooled)


def embeddings_output(request_ids: Sequence[int], pooled: torch.Tensor) -> ModelRunnerOutput:
    """pooled [S, H], one row a request."""
    rows = pooled.float().cpu().numpy()
    output = ModelRunnerOutput([], [], [])
    for request_id, row, is_finite in zip(request_ids, rows, np.isfinite(rows).all(axis=-1), strict=True):
        if is_finite:
            output.embeddings[request_id] = row.astype("<f4").tobytes()
        else:
            output.failed[request_id] = NOT_FINITE
    return output

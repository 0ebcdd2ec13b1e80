"""PoolingRunner: prompts in, embeddings out, over the paged cache of a decoder or, of an encoder, without one.

Knows nothing of queues, budgets or texts, and no device by name.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.checkpoint.model_config import ModelConfig, PoolingConfig
from octavo.core.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from octavo.devices.device import Device, KVLayout, KVPool, StepRoom
from octavo.layers.pooling import Pooling
from octavo.models.loader import Encoder
from octavo.runner.input_batch import InputBatch
from octavo.runner.kv_cache import layer_caches
from octavo.runner.model_calls import ContextCalls

__all__ = ["PoolingRunner"]

NOT_FINITE = "The embedding is not finite: the computation overflowed or the weights are damaged."


class PoolingRunner:
    """A request is pooled in the step that reaches the end of its prompt, where another would sample a token."""

    def __init__(
        self,
        model: Encoder,
        model_config: ModelConfig,
        device: Device,
        dtype: torch.dtype,
        room: StepRoom,
        kv_layout: KVLayout | None,
        pooling: PoolingConfig,
        eager: bool = False,
    ) -> None:
        """kv_layout: None of an encoder, whose prompts come whole."""
        self.ops = device.ops
        kv_pool: KVPool | None = None
        caches: list[torch.Tensor] = []
        if kv_layout is not None:
            assert pooling.mode == "last"
            kv_pool = device.make_kv_pool(kv_layout)
            caches = layer_caches(model_config, kv_pool.caches)
        self.buffers = device.make_step_buffers(room)
        calls = ContextCalls(model, device.ops, dtype, caches, has_logits=False)
        self.forward = device.capture(calls, self.buffers, kv_pool, eager)
        self.batch = InputBatch(self.buffers)
        self.pooling = Pooling(pooling)

    @torch.inference_mode()
    def begin(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; none waits for masks."""
        assert not step.copies  # there is no tier, and no request forks
        self.forget(step.forgotten_request_ids)
        for request in step.new_requests:
            self.batch.add(request)
        self.batch.apply(step)
        size, _ = self.batch.fill(step.entries)
        self.forward.run(size)
        inputs = self.buffers.tensors(size)
        rows = inputs.query_start[:-1] if self.pooling.config.mode == "cls" else inputs.logits_rows
        pooled = self.pooling.pooled(self.forward.hidden_states(), rows, inputs.query_start, self.ops)
        lengths = np.linalg.norm(pooled.float().cpu().numpy(), axis=-1)
        if self.pooling.config.normalize:
            pooled = self.ops.l2_normalize(pooled)
        request_ids = [entry.request_id for entry in step.entries if entry.num_logits]
        return _embeddings(request_ids, pooled, lengths)

    def finish(self, masks: TokenMasks) -> ModelRunnerOutput:
        raise AssertionError("no step samples")

    def forget(self, request_ids: list[int]) -> None:
        """Drop all state of requests that are finished."""
        for request_id in request_ids:
            self.batch.remove(request_id)


def _embeddings(
    request_ids: Sequence[int], pooled: torch.Tensor, lengths: npt.NDArray[np.float32]
) -> ModelRunnerOutput:
    """pooled [S, H], a row a request; lengths [S] of the rows before they were normalised."""
    rows = np.column_stack((pooled.float().cpu().numpy(), lengths))
    output = ModelRunnerOutput([], [], [])
    for request_id, row, is_finite in zip(request_ids, rows, np.isfinite(rows).all(axis=-1), strict=True):
        if is_finite:
            output.embeddings[request_id] = row.astype("<f4").tobytes()
        else:
            output.failed[request_id] = NOT_FINITE
    return output

"""How a step calls its model: eagerly, op by op, or captured once and replayed (DESIGN 8). The one place that decides.

Knows models and a step's inputs; nothing of requests or sampling.
"""

from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from octavo.config import ResolvedConfig
from octavo.kernels.ops import Ops
from octavo.layers.context import StepContext
from octavo.models.loader import CausalLM, Encoder
from octavo.runner.input_batch import StepInputs
from octavo.runner.logprobs import BLOCK

__all__ = ["EagerForward", "Forward", "ReplayedForward", "make_forward", "step_context"]

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class Forward(Protocol):
    """The model's part of a step. What it returns holds until it is called again, and may be written over."""

    def run(self, inputs: StepInputs) -> None:
        """Compute the step's hidden states."""
        ...

    def hidden_states(self) -> torch.Tensor:
        """Those of the last step: [T, H]."""
        ...

    def logits(self, tokens: Int32Array) -> Float32Array:
        """Logits [S, V] of the last step's tokens with these indices [S]; of a decoder only."""
        ...


def make_forward(
    model: Encoder, ops: Ops, config: ResolvedConfig, kv_caches: list[torch.Tensor], device: torch.device
) -> Forward:
    """Replayed where ops can be recorded and --enforce-eager does not forbid it."""
    eager = EagerForward(model, ops, getattr(torch, config.dtype), kv_caches, device)
    if config.enforce_eager or config.provider != "cpu":
        return eager
    return ReplayedForward(eager, config)


class EagerForward:
    def __init__(
        self, model: Encoder, ops: Ops, dtype: torch.dtype, kv_caches: list[torch.Tensor], device: torch.device
    ) -> None:
        self.model = model
        self.ops = ops
        self.dtype = dtype
        self.kv_caches = kv_caches
        self.device = device

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> None:
        self._context = step_context(self.ops, self.dtype, inputs, self.kv_caches, self.device)
        self._hidden_states = self.model(_to_device(inputs.input_ids, self.device), self._context)

    def hidden_states(self) -> torch.Tensor:
        return self._hidden_states

    @torch.inference_mode()
    def logits(self, tokens: Int32Array) -> Float32Array:
        model = cast(CausalLM, self.model)
        logits = model.logits(self._hidden_states, _to_device(tokens, self.device), self._context)
        array: Float32Array = logits.cpu().numpy()
        return array


class ReplayedForward:
    """Captured for the largest step that the configuration allows; a step's inputs are copied to where it reads them.
    Here torch is not called between steps: the weights leave its code no place in the caches.

    Invariant: the recorded addresses are those of `_inputs`, of the caches, of the model's weights and of the arena.
    """

    @torch.inference_mode()
    def __init__(self, eager: EagerForward, config: ResolvedConfig) -> None:
        from octavo.kernels.replay import Arena, record

        self._eager = eager
        self._num_tokens = 0
        num_tokens, num_requests = config.max_num_batched_tokens, config.max_num_seqs
        arena = Arena()
        self._inputs = _largest_inputs(config)
        self._rows = np.zeros(max(num_requests, BLOCK), dtype=np.int32)
        ctx = step_context(eager.ops, eager.dtype, self._inputs, eager.kv_caches, eager.device)
        ids, rows = torch.from_numpy(self._inputs.input_ids), torch.from_numpy(self._rows)
        self._hidden_states = record(lambda: eager.model(ids, ctx), num_tokens, num_requests, arena)
        if config.pooling is None:
            model, hidden_states = cast(CausalLM, eager.model), self._hidden_states.result
            self._logits = record(lambda: model.logits(hidden_states, rows, ctx), len(rows), num_requests, arena)
            self._logits_array: Float32Array = self._logits.result.numpy()

    def run(self, inputs: StepInputs) -> None:
        num_requests = len(inputs.seq_lens)
        self._num_tokens = len(inputs.input_ids)
        static = self._inputs
        static.input_ids[: self._num_tokens] = inputs.input_ids
        static.positions[: self._num_tokens] = inputs.positions
        for slots, new_slots in zip(static.slot_mappings, inputs.slot_mappings, strict=True):
            slots[: self._num_tokens] = new_slots
        for table, new_table in zip(static.block_tables, inputs.block_tables, strict=True):
            table[:num_requests, : new_table.shape[1]] = new_table
        static.query_start[: num_requests + 1] = inputs.query_start
        static.seq_lens[: len(inputs.seq_lens)] = inputs.seq_lens
        self._hidden_states.run(self._num_tokens, num_requests)

    def hidden_states(self) -> torch.Tensor:
        return self._hidden_states.result[: self._num_tokens]

    def logits(self, tokens: Int32Array) -> Float32Array:
        num_rows = len(tokens)
        self._rows[:num_rows] = tokens
        self._logits.run(num_rows, 0)
        return self._logits_array[:num_rows]


def _largest_inputs(config: ResolvedConfig) -> StepInputs:
    """Inputs of the most tokens and requests; memory that no step touches is never committed."""
    num_tokens, num_requests = config.max_num_batched_tokens, config.max_num_seqs
    max_blocks = -(-config.max_model_len // config.block_size)

    def zeros(*shape: int) -> Int32Array:
        return np.zeros(shape, dtype=np.int32)

    return StepInputs(
        rows=np.zeros(num_requests, dtype=np.intp),
        input_ids=zeros(num_tokens),
        positions=zeros(num_tokens),
        slot_mappings=[zeros(num_tokens) for _ in config.group_windows],
        block_tables=[zeros(num_requests, max_blocks) for _ in config.group_windows],
        query_start=zeros(num_requests + 1),
        seq_lens=zeros(num_requests),
        sampled=np.zeros(num_requests, dtype=np.intp),
        logits_rows=zeros(num_requests),
    )


def step_context(
    ops: Ops, dtype: torch.dtype, inputs: StepInputs, kv_caches: list[torch.Tensor], device: torch.device
) -> StepContext:
    return StepContext(
        ops=ops,
        dtype=dtype,
        positions=_to_device(inputs.positions, device),
        slot_mappings=tuple(_to_device(slots, device) for slots in inputs.slot_mappings),
        block_tables=tuple(_to_device(table, device) for table in inputs.block_tables),
        query_start=_to_device(inputs.query_start, device),
        seq_lens=_to_device(inputs.seq_lens, device),
        kv_caches=kv_caches,
    )


def _to_device(array: Int32Array, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)

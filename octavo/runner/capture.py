"""How a step calls its model: eagerly, op by op, or captured once and replayed (DESIGN 8). The one place that decides.

Knows models and a step's inputs; nothing of requests or sampling.
"""

from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from octavo.config import ResolvedConfig
from octavo.kernels.ops import Ops
from octavo.kernels.step_inputs import StepArrays, StepInputs
from octavo.layers.context import StepContext
from octavo.models.loader import CausalLM, Encoder
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
    model: Encoder,
    ops: Ops,
    config: ResolvedConfig,
    kv_caches: list[torch.Tensor],
    device: torch.device,
    arrays: StepArrays,
) -> Forward:
    """Replayed where ops can be recorded and --enforce-eager does not forbid it. `arrays` hold every step's inputs."""
    eager = EagerForward(model, ops, getattr(torch, config.dtype), kv_caches, device)
    if config.enforce_eager or config.provider != "cpu":
        return eager
    return ReplayedForward(eager, config, arrays)


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
    """Captured for the largest step that the configuration allows, whose inputs' arrays serve every step.
    Here torch is not called between steps: the weights leave its code no place in the caches.

    Invariant: the recorded addresses are those of `arrays`, of the caches, of the model's weights and of the arena.
    """

    @torch.inference_mode()
    def __init__(self, eager: EagerForward, config: ResolvedConfig, arrays: StepArrays) -> None:
        from octavo.kernels.replay import Arena, record

        self._eager = eager
        self._num_tokens = 0
        num_tokens, num_requests = len(arrays.positions), len(arrays.seq_lens)
        arena = Arena()
        self._arrays = arrays
        self._rows = np.zeros(max(num_requests, BLOCK), dtype=np.int32)
        ctx = step_context(eager.ops, eager.dtype, arrays, eager.kv_caches, eager.device)
        ids, rows = torch.from_numpy(arrays.input_ids), torch.from_numpy(self._rows)
        self._hidden_states = record(lambda: eager.model(ids, ctx), num_tokens, num_requests, arena)
        if config.pooling is None:
            model, hidden_states = cast(CausalLM, eager.model), self._hidden_states.result
            self._logits = record(lambda: model.logits(hidden_states, rows, ctx), len(rows), num_requests, arena)
            self._logits_array: Float32Array = self._logits.result.numpy()

    def run(self, inputs: StepInputs) -> None:
        assert inputs.arrays is self._arrays
        self._num_tokens = inputs.num_tokens
        self._hidden_states.run(inputs.num_tokens, inputs.num_requests)

    def hidden_states(self) -> torch.Tensor:
        return self._hidden_states.result[: self._num_tokens]

    def logits(self, tokens: Int32Array) -> Float32Array:
        num_rows = len(tokens)
        self._rows[:num_rows] = tokens
        self._logits.run(num_rows, 0)
        return self._logits_array[:num_rows]


def step_context(
    ops: Ops,
    dtype: torch.dtype,
    inputs: StepInputs | StepArrays,
    kv_caches: list[torch.Tensor],
    device: torch.device,
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

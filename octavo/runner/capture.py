"""How a step calls its model: eagerly, op by op, or captured once and replayed (DESIGN 8). The one place that decides.

Knows models and a step's inputs; nothing of requests or sampling.
"""

from collections.abc import Callable
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from octavo.kernels.ops import Ops
from octavo.kernels.step_inputs import StepArrays, StepInputs
from octavo.layers.context import StepContext
from octavo.models.loader import CausalLM, Encoder
from octavo.resolve import ResolvedConfig
from octavo.runner.logprobs import BLOCK
from octavo.runner.sampler import Draw

__all__ = ["EagerForward", "Forward", "ReplayedForward", "make_forward", "step_context"]

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class Forward(Protocol):
    """The model's part of a step. What a method returns holds until it is called again, and may be written over."""

    def run(self, inputs: StepInputs, draw: Draw = "no") -> None:
        """Compute the step's hidden states and, of a decoder, the logits of the tokens from which one is sampled, or
        what is to be drawn by them: `inputs.draws`."""
        ...

    def hidden_states(self) -> torch.Tensor:
        """Those of the last step: [T, H]."""
        ...

    def sampled_logits(self) -> Float32Array:
        """Those that `run` has computed, if it drew nothing: [S, V]."""
        ...

    def logits(self, tokens: Int32Array) -> Float32Array:
        """Logits [B, V] of others, with these indices [B] among the last step's; BLOCK of them at most."""
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
    eager = EagerForward(
        model, ops, getattr(torch, config.weights.dtype), kv_caches, device, samples=config.runtime.pooling is None
    )
    if config.runtime.enforce_eager or config.runtime.provider != "cpu":
        return eager
    return ReplayedForward(eager, arrays)


class EagerForward:
    def __init__(
        self,
        model: Encoder,
        ops: Ops,
        dtype: torch.dtype,
        kv_caches: list[torch.Tensor],
        device: torch.device,
        samples: bool,
    ) -> None:
        self.model = model
        self.ops = ops
        self.dtype = dtype
        self.kv_caches = kv_caches
        self.device = device
        self.samples = samples

    @torch.inference_mode()
    def run(self, inputs: StepInputs, draw: Draw = "no") -> None:
        self._context = step_context(self.ops, self.dtype, inputs, self.kv_caches, self.device)
        self._hidden_states = self.model(_to_device(inputs.input_ids, self.device), self._context)
        if draw == "most_likely":
            rows = _to_device(inputs.logits_rows, self.device)
            cast(CausalLM, self.model).most_likely(self._hidden_states, rows, inputs.draws, self._context)
        elif self.samples:
            self._sampled_logits = self.logits(inputs.logits_rows)
            if draw == "any":
                self.ops.sample_rows(self._sampled_logits, inputs.draws)

    def hidden_states(self) -> torch.Tensor:
        return self._hidden_states

    def sampled_logits(self) -> Float32Array:
        return self._sampled_logits

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
    def __init__(self, eager: EagerForward, arrays: StepArrays) -> None:
        from octavo.devices.cpu.replay import Arena, Replay, record, run_replays

        self._run_replays = run_replays
        self._eager = eager
        self._arrays = arrays
        self._num_tokens = self._num_sampled = 0
        num_requests = len(arrays.seq_lens)
        arena = Arena()
        ctx = step_context(eager.ops, eager.dtype, arrays, eager.kv_caches, eager.device)

        def recorded(num_rows: int, compute: Callable[[], torch.Tensor]) -> Replay:
            return record(compute, num_rows, num_requests, arena)

        ids = torch.from_numpy(arrays.input_ids)
        self._hidden_states = recorded(len(ids), lambda: eager.model(ids, ctx))
        if not eager.samples:
            return
        self._other_rows = np.zeros(BLOCK, dtype=np.int32)
        model, hidden_states = cast(CausalLM, eager.model), self._hidden_states.result
        rows, other_rows = torch.from_numpy(arrays.logits_rows), torch.from_numpy(self._other_rows)
        self._sampled_logits = recorded(num_requests, lambda: model.logits(hidden_states, rows, ctx))
        self._other_logits = recorded(BLOCK, lambda: model.logits(hidden_states, other_rows, ctx))
        self._sampled_array: Float32Array = self._sampled_logits.result.numpy()
        self._other_array: Float32Array = self._other_logits.result.numpy()

        def draw_any() -> torch.Tensor:
            eager.ops.sample_rows(self._sampled_array, arrays.draws)
            return self._sampled_logits.result

        def draw_most_likely() -> torch.Tensor:
            model.most_likely(hidden_states, rows, arrays.draws, ctx)
            return hidden_states

        self._draw_any = recorded(num_requests, draw_any)
        self._draw_most_likely = recorded(num_requests, draw_most_likely)

    def run(self, inputs: StepInputs, draw: Draw = "no") -> None:
        assert inputs.arrays is self._arrays
        num_sampled = inputs.num_sampled
        self._num_tokens, self._num_sampled = inputs.num_tokens, num_sampled
        runs = [(self._hidden_states.recording, inputs.num_tokens, inputs.num_requests)]
        if num_sampled and draw == "most_likely":
            runs.append((self._draw_most_likely.recording, num_sampled, 0))
        elif num_sampled and self._eager.samples:
            runs.append((self._sampled_logits.recording, num_sampled, 0))
            if draw == "any":
                runs.append((self._draw_any.recording, num_sampled, 0))
        self._run_replays(runs)

    def hidden_states(self) -> torch.Tensor:
        return self._hidden_states.result[: self._num_tokens]

    def sampled_logits(self) -> Float32Array:
        return self._sampled_array[: self._num_sampled]

    def logits(self, tokens: Int32Array) -> Float32Array:
        num_rows = len(tokens)
        self._other_rows[:num_rows] = tokens
        self._other_logits.run(num_rows, 0)
        return self._other_array[:num_rows]


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

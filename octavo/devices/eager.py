"""EagerForward: a model called op by op in every step. What a device without capture has, and --enforce-eager asks
for."""

from collections.abc import Sequence

import torch

from octavo.devices.device import Draw, ModelCalls, StepBuffers, StepSize
from octavo.kernels.ops import Ops

__all__ = ["EagerForward"]


class EagerForward:
    def __init__(self, model: ModelCalls, ops: Ops, buffers: StepBuffers) -> None:
        self.model = model
        self.ops = ops
        self.buffers = buffers

    @torch.inference_mode()
    def run(self, size: StepSize, draw: Draw = "no") -> None:
        self._inputs = inputs = self.buffers.tensors(size)
        self._hidden_states = self.model.hidden_states(inputs)
        if not self.model.has_logits or (draw != "no" and not size.num_logits):
            return
        if draw == "most_likely":
            self.model.most_likely(self._hidden_states, inputs)
            return
        self._sampled_logits = self.model.logits(self._hidden_states, inputs.logits_rows, inputs)
        if draw == "any":
            self.ops.sample_rows(self._sampled_logits, inputs.draws, inputs.masks)

    def hidden_states(self) -> torch.Tensor:
        return self._hidden_states

    def sampled_logits(self) -> torch.Tensor:
        return self._sampled_logits

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        rows = torch.tensor(tokens, dtype=torch.int32, device=self._hidden_states.device)
        return self.model.logits(self._hidden_states, rows, self._inputs)

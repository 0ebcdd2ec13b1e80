"""ModelCalls of this project's models: a step's inputs as a `StepContext`."""

from collections.abc import Sequence
from typing import cast

import torch

from octavo.devices.device import StepTensors
from octavo.kernels.ops import Ops
from octavo.layers.context import StepContext
from octavo.models.loader import CausalLM, Encoder

__all__ = ["ContextCalls"]


class ContextCalls:
    def __init__(
        self,
        model: Encoder,
        ops: Ops,
        dtype: torch.dtype,
        kv_caches: Sequence[torch.Tensor],
        has_logits: bool,
    ) -> None:
        """kv_caches: one a layer. has_logits: whether steps end in logits, so that the model is a CausalLM."""
        self.has_logits = has_logits
        self.model = model
        self._ops = ops
        self._dtype = dtype
        self._kv_caches = list(kv_caches)

    def hidden_states(self, inputs: StepTensors) -> torch.Tensor:
        return self.model(inputs.input_ids, self._context(inputs))

    def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor, inputs: StepTensors) -> torch.Tensor:
        return cast(CausalLM, self.model).logits(hidden_states, rows, self._context(inputs))

    def most_likely(self, hidden_states: torch.Tensor, inputs: StepTensors) -> None:
        model, ctx = cast(CausalLM, self.model), self._context(inputs)
        model.most_likely(hidden_states, inputs.logits_rows, inputs.draws, ctx)

    def _context(self, inputs: StepTensors) -> StepContext:
        return StepContext(
            ops=self._ops,
            dtype=self._dtype,
            positions=inputs.positions,
            slot_mappings=inputs.slot_mappings,
            block_tables=inputs.block_tables,
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens,
            kv_caches=self._kv_caches,
        )

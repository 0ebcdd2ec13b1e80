"""ReplayedForward: a model captured for the largest step there is room for, replayed by one native call a step."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from octavo.devices.cpu import _cpu
from octavo.devices.cpu.replay import Arena, Replay, record
from octavo.devices.device import ModelCalls, StepTensors
from octavo.devices.host_buffers import HostBuffers
from octavo.kernels.ops import Ops

__all__ = ["ReplayedForward"]

OTHER_ROWS = 64
"""Most tokens whose logits `Forward.logits` gives at once."""


class ReplayedForward:
    """Here torch is not called between steps: the weights leave its code no place in the caches.

    `run` is the native call itself. Invariant: the recorded addresses are those of the buffers, of the KV caches, of
    the model's weights and of the arena."""

    @torch.inference_mode()
    def __init__(self, model: ModelCalls, ops: Ops, buffers: HostBuffers) -> None:
        self._model = model  # the recordings have the addresses of its weights and caches
        self._buffers = buffers
        self._arena = Arena()
        self._most = buffers.most
        inputs = buffers.tensors(self._most)
        self._hidden_states = self._record(self._most.num_tokens, lambda: model.hidden_states(inputs))
        self._other_rows = np.zeros(OTHER_ROWS, dtype=np.int32)
        self._logits: tuple[Replay, Replay] | None = None  # of the rows that are sampled, and of others
        draws: list[Replay] = []
        if model.has_logits:
            sampled = self._record_logits(model, inputs.logits_rows, inputs)
            self._logits = (sampled, self._record_logits(model, torch.from_numpy(self._other_rows), inputs))
            draws = [sampled, *self._record_draws(model, ops, sampled.result, inputs)]
        recordings = [self._hidden_states, *draws]
        self._step = _cpu.StepReplay(*(replay.recording for replay in recordings))
        self.run = self._step.run

    def _record(self, num_rows: int, compute: Callable[[], torch.Tensor]) -> Replay:
        return record(compute, num_rows, self._most.num_requests, self._arena)

    def _record_logits(self, model: ModelCalls, rows: torch.Tensor, inputs: StepTensors) -> Replay:
        return self._record(len(rows), lambda: model.logits(self._hidden_states.result, rows, inputs))

    def _record_draws(
        self, model: ModelCalls, ops: Ops, logits: torch.Tensor, inputs: StepTensors
    ) -> tuple[Replay, Replay]:
        def draw_any() -> torch.Tensor:
            ops.sample_rows(logits, inputs.draws, inputs.masks)
            return logits

        def draw_most_likely() -> torch.Tensor:
            model.most_likely(self._hidden_states.result, inputs)
            return logits

        num_rows = len(inputs.logits_rows)
        return self._record(num_rows, draw_any), self._record(num_rows, draw_most_likely)

    def hidden_states(self) -> torch.Tensor:
        return self._hidden_states.result[: self._buffers.size.num_tokens]

    def sampled_logits(self) -> torch.Tensor:
        assert self._logits is not None
        return self._logits[0].result[: self._buffers.size.num_logits]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        assert self._logits is not None
        num_rows = len(tokens)
        self._other_rows[:num_rows] = tokens
        self._logits[1].run(num_rows, 0)
        return self._logits[1].result[:num_rows]

"""MemoryRoof: how fast memory lets a model decode, and how near to that its steps come.

Plain arithmetic: others measure the rate at which memory is read, and how long steps take.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from octavo.core.kv_groups import KVGroup
from octavo.core.step import SchedulerOutput

__all__ = ["MemoryRoof", "kv_token_bytes"]

KEPT = 0.99
"""Of what is known, at each further step: the share is that of about the last hundred."""


def kv_token_bytes(groups: Sequence[KVGroup], group_bytes: int) -> dict[int, int]:
    """Bytes of one token's keys and values in all layers of each window, where the largest group holds `group_bytes` of
    them."""
    layer_bytes = group_bytes // max(len(group.layers) for group in groups)
    num_layers: Counter[int] = Counter()
    for group in groups:
        num_layers[group.window] += len(group.layers)
    return {window: num * layer_bytes for window, num in num_layers.items()}


class MemoryRoof:
    """Bounds decoding, whose steps read every weight for few tokens. Prompts are bound by arithmetic."""

    def __init__(self, bytes_per_s: float, weight_bytes: int, kv_token_bytes: Mapping[int, int]) -> None:
        """bytes_per_s: at which memory is read; weight_bytes: what every step reads; kv_token_bytes: by window, 0 for
        none, what it reads beside for each token that a sequence sees."""
        self.bytes_per_s = bytes_per_s
        self.weight_bytes = weight_bytes
        self._kv_token_bytes = kv_token_bytes
        self._read_bytes = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Most tokens a second of one stream, its keys and values left out."""
        return self.bytes_per_s / self.weight_bytes

    @property
    def share(self) -> float:
        """Of `bytes_per_s`, at which the latest decode steps read what they must; 0 before the first."""
        return self._read_bytes / (self._seconds * self.bytes_per_s) if self._seconds else 0.0

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        """A step that took so long. Counts if each of its requests has one token, and somebody measured."""
        if seconds <= 0 or {entry.num_tokens for entry in step.entries} != {1}:
            return
        self._read_bytes = KEPT * self._read_bytes + self._step_bytes(step)
        self._seconds = KEPT * self._seconds + seconds

    def _step_bytes(self, step: SchedulerOutput) -> int:
        """The weights once, and each sequence's keys and values, though sequences may share blocks."""
        num_bytes = self.weight_bytes
        for window, token_bytes in self._kv_token_bytes.items():
            seen = [entry.first_position for entry in step.entries]
            if window:
                seen = [min(num_tokens, window - 1) for num_tokens in seen]
            num_bytes += token_bytes * (sum(seen) + len(seen))
        return num_bytes

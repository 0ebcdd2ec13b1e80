"""ReferenceDevice: the definitions themselves, computed by torch and numpy on the CPU, many times slower than
needed."""

import time
from collections.abc import Sequence

import torch

from octavo.devices.device import CopyResult, Forward, KVLayout, KVPool, ModelCalls, StepBuffers, StepRoom
from octavo.devices.eager import EagerForward
from octavo.devices.host_buffers import HostBuffers
from octavo.devices.host_sampler import HostSampler
from octavo.devices.machine import free_memory_bytes
from octavo.devices.rates import flops_per_s
from octavo.devices.reference.filler import ReferenceFiller
from octavo.kernels.ops import Ops
from octavo.kernels.quantized import QuantizedForm

__all__ = ["ReferenceDevice", "ReferencePool"]


class ReferenceDevice:
    name = "reference"
    remark = "plain torch; the native kernels are not used"

    def __init__(self) -> None:
        self.ops = Ops()

    def set_num_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def free_memory_bytes(self) -> int:
        return free_memory_bytes()

    def flops_per_s(
        self, hidden_size: int, dtype: torch.dtype, form: QuantizedForm | None, int8_activations: bool
    ) -> float:
        return flops_per_s(self.ops, hidden_size, dtype, form, int8_activations)

    def read_bytes_per_s(self, tensors: Sequence[torch.Tensor]) -> float | None:
        return None

    def progress(self) -> int:
        """Torch counts nothing, but where it computes it takes CPU time."""
        return int(time.process_time())

    def make_kv_pool(self, layout: KVLayout) -> "ReferencePool":
        return ReferencePool(self.ops, layout)

    def make_step_buffers(self, room: StepRoom) -> HostBuffers:
        return HostBuffers(room, ReferenceFiller)

    def make_sampler(self, vocab_size: int, buffers: StepBuffers) -> HostSampler:
        assert isinstance(buffers, HostBuffers)
        return HostSampler(vocab_size, self.ops, buffers)

    def capture(self, model: ModelCalls, buffers: StepBuffers, kv_pool: KVPool | None, eager: bool) -> Forward:
        """Torch's calls are not captured."""
        return EagerForward(model, self.ops, buffers)


class ReferencePool:
    """Pool and tier are one tensor a cache, the tier in memory as the pool is."""

    def __init__(self, ops: Ops, layout: KVLayout) -> None:
        num_blocks = layout.num_blocks + layout.num_tier_blocks
        shape = ops.kv_cache_shape(num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim, layout.dtype)
        self.caches = [torch.zeros(shape, dtype=layout.dtype) for _ in range(layout.num_caches)]

    def copy(self, copies: Sequence[tuple[int, int]]) -> CopyResult:
        start = time.perf_counter()
        for cache in self.caches:
            for source, destination in copies:
                cache[destination].copy_(cache[source])
        return CopyResult([], time.perf_counter() - start)

    def measure_copy_rate(self) -> float:
        seconds = min(self.copy([(0, 0)]).seconds for _ in range(3))
        return sum(cache[0].nbytes for cache in self.caches) / seconds

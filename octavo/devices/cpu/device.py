"""CpuDevice: the native kernels over the host's memory, where tensors are arrays and a step is one native call."""

import time
from collections.abc import Sequence

import torch

from octavo.devices.cpu import _cpu
from octavo.devices.cpu.capture import ReplayedForward
from octavo.devices.cpu.kv_pool import CpuPool, PopulatedForward
from octavo.devices.cpu.ops import CpuOps
from octavo.devices.device import Forward, KVLayout, KVPool, ModelCalls, StepBuffers, StepRoom
from octavo.devices.eager import EagerForward
from octavo.devices.host_buffers import BatchTables, Filler, HostBuffers, StepArrays
from octavo.devices.host_sampler import HostSampler
from octavo.devices.machine import free_memory_bytes
from octavo.devices.rates import flops_per_s
from octavo.kernels.quantized import QuantizedForm

__all__ = ["CpuDevice"]

READ_BYTES = 512 << 20
"""Read at most, to measure the rate."""


class CpuDevice:
    """Threads and instruction set belong to the process, not to an instance."""

    name = "cpu"
    remark = ""

    def __init__(self) -> None:
        self.ops = CpuOps()

    def set_num_threads(self, num_threads: int) -> None:
        _cpu.set_num_threads(num_threads)
        torch.set_num_threads(1)

    def free_memory_bytes(self) -> int:
        return free_memory_bytes()

    def flops_per_s(
        self, hidden_size: int, dtype: torch.dtype, form: QuantizedForm | None, int8_activations: bool
    ) -> float:
        return flops_per_s(self.ops, hidden_size, dtype, form, int8_activations)

    def read_bytes_per_s(self, tensors: Sequence[torch.Tensor], seconds: float = 0.05) -> float | None:
        """On the threads that ops compute on, of the first 512 MB: the best of what fits in `seconds`. Nothing is
        allocated."""
        buffers, num_bytes = [], 0
        for tensor in tensors:
            size = min(tensor.nbytes, READ_BYTES - num_bytes)
            buffers.append((tensor.data_ptr(), size))
            num_bytes += size
        best = float("inf")
        deadline = time.perf_counter() + seconds
        while True:
            best = min(best, _cpu.time_read(buffers))
            if time.perf_counter() > deadline:
                return num_bytes / best

    def progress(self) -> int:
        return _cpu.progress()

    def make_kv_pool(self, layout: KVLayout) -> CpuPool:
        return CpuPool(self.ops, layout)

    def make_step_buffers(self, room: StepRoom) -> HostBuffers:
        return HostBuffers(room, make_filler)

    def make_sampler(self, vocab_size: int, buffers: StepBuffers) -> HostSampler:
        assert isinstance(buffers, HostBuffers)
        return HostSampler(vocab_size, self.ops, buffers)

    def capture(self, model: ModelCalls, buffers: StepBuffers, kv_pool: KVPool | None, eager: bool) -> Forward:
        assert isinstance(buffers, HostBuffers)
        forward: Forward = EagerForward(model, self.ops, buffers)
        if not eager:
            forward = ReplayedForward(model, self.ops, buffers)
        if isinstance(kv_pool, CpuPool) and kv_pool.tier is not None:
            return PopulatedForward(forward, kv_pool.tier, buffers.arrays, buffers.room.block_size)
        return forward


def make_filler(tables: BatchTables, arrays: StepArrays) -> Filler:
    """The native filler: `ReferenceFiller` in C++."""
    inputs = [arrays.input_ids, arrays.positions, arrays.query_start, arrays.seq_lens, arrays.logits_rows]
    slots, step_tables = list(arrays.slot_mappings), list(arrays.block_tables)
    rows = (tables.token_ids, tables.block_tables, tables.block_size)
    return _cpu.StepFiller(*rows, inputs, slots, step_tables, arrays.draws)

"""The native provider at its edges: what it refuses, its threads, its choice of instruction set."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from octavo.devices.cpu import ops as cpu
from octavo.devices.cpu.device import CpuDevice
from octavo.devices.cpu.ops import CpuOps
from octavo.devices.registry import open_device
from octavo.kernels.ops import Ops
from tests.kernels.expected import KVInputs


def run_python(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


@pytest.fixture
def inputs() -> KVInputs:
    return KVInputs.random([20, 40], [1, 3], 4, 2, 16, torch.float32)


def test_providers_by_name() -> None:
    assert type(open_device("REFERENCE").ops) is Ops
    assert type(open_device("cpu").ops) is CpuOps
    assert type(open_device().ops) is CpuOps


def test_ops_import_without_the_extension() -> None:
    code = "import sys; import octavo.kernels.ops; print('octavo.devices.cpu._cpu' in sys.modules)"
    assert run_python(code) == "False"


def test_the_instruction_set_can_be_chosen_by_environment() -> None:
    code = "from octavo.devices.cpu import _cpu; print(_cpu.isa())"
    for isa in cpu.supported_isas():
        assert run_python(code, OCTAVO_CPU_ISA=isa) == isa
    best = next(isa for isa in cpu.supported_isas() if isa != "avx512bf16")  # that one is better on some CPUs only
    assert run_python(code) in ({best, "avx512bf16"} if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else {best})


def test_an_unknown_instruction_set_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'mmx'.*scalar"):
        cpu.set_isa("mmx")


def test_ops_compute_on_one_thread_until_told() -> None:
    assert run_python("from octavo.devices.cpu import _cpu; print(_cpu.num_threads())") == "1"


def test_the_number_of_threads_can_change_at_any_time(native: CpuOps) -> None:
    packed, x = native.pack(torch.randn(64, 32)), torch.randn(40, 32)
    expected = native.linear(x, packed, None, torch.float32)
    for num_threads in (1, 4, 2, 3):
        cpu.set_num_threads(num_threads)
        assert cpu.num_threads() == num_threads
        assert torch.equal(native.linear(x, packed, None, torch.float32), expected)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        cpu.set_num_threads(0)


def test_setting_the_providers_threads_holds_torch_to_one() -> None:
    torch.set_num_threads(2)
    CpuDevice().set_num_threads(2)
    assert (cpu.num_threads(), torch.get_num_threads()) == (2, 1)


def test_ops_may_be_called_from_several_threads() -> None:
    ops = CpuOps()
    weight, x = ops.pack(torch.randn(640, 96).bfloat16()), torch.randn(64, 96).bfloat16()
    expected = ops.linear(x, weight, None, torch.float32)
    wrong = []

    def work() -> None:
        for _ in range(100):
            if not torch.equal(ops.linear(x, weight, None, torch.float32), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_packed_weights_are_aligned_and_padded_with_zeros() -> None:
    packed = CpuOps().pack(torch.ones(17, 3).bfloat16())
    assert packed.data.data_ptr() % 64 == 0
    assert packed.data.numel() == 2 * 16 * 4
    assert packed.data.float().sum() == 17 * 3


def test_a_transposed_matrix_packs_as_what_it_shows() -> None:
    ops, matrix, x = CpuOps(), torch.randn(5, 20), torch.randn(3, 5)
    straight = ops.linear(x, ops.pack(matrix.T.contiguous()), None, torch.float32)
    assert torch.equal(ops.linear(x, ops.pack(matrix.T), None, torch.float32), straight)


def test_indices_outside_their_tensor_are_refused(inputs: KVInputs) -> None:
    ops = CpuOps()
    packed = ops.pack(torch.randn(20, 8))
    for bad in (20, -1):
        with pytest.raises(IndexError, match=rf"token_ids\[1\] is {bad}, outside \[0, 20\)"):
            ops.embedding(torch.tensor([3, bad], dtype=torch.int32), packed)
    for starts in ([0, 3], [1, 4], [0, 5, 4]):
        row_start = torch.tensor(starts, dtype=torch.int32)
        with pytest.raises(IndexError, match="row_start must run from 0"):
            ops.mean_rows(torch.randn(4, 16), row_start)
        with pytest.raises(IndexError, match="query_start must run from 0"):
            ops.encoder_attention(torch.randn(4, 48), row_start, 1, 1.0)
    with pytest.raises(IndexError, match="indices"):
        ops.gather_rows(torch.randn(4, 2), torch.tensor([4], dtype=torch.int32))
    cache = inputs.cache(ops, torch.float32)
    slots = cache.shape[0] * 16
    for positions, slot, name in (([0, 1], [0, slots], "slot_mapping"), ([0, 7], [0, 1], "positions")):
        kv = torch.randn(2, 2 * 2 * 16)
        index = [torch.tensor(values, dtype=torch.int32) for values in (positions, slot)]
        with pytest.raises(IndexError, match=name):
            ops.rope_write_kv(kv, index[0], torch.randn(7, 16), cache, index[1], 0, 2)
    table = inputs.block_table()
    table[1, 2] = cache.shape[0]
    with pytest.raises(IndexError, match=r"block_table\[2\]"):
        inputs.attend(ops, cache, table)
    with pytest.raises(IndexError, match="block table for 32 tokens"):
        inputs.attend(ops, cache, inputs.block_table()[:, :2].contiguous())


def test_wrong_shapes_and_dtypes_are_refused(inputs: KVInputs) -> None:
    ops = CpuOps()
    packed = ops.pack(torch.randn(20, 8))
    with pytest.raises(ValueError, match=r"x must be contiguous \(3, 8\), not \(3, 9\)"):
        ops.linear(torch.randn(3, 9), packed, None, torch.float32)
    with pytest.raises(ValueError, match="not contiguous"):
        ops.linear(torch.randn(8, 3).T, packed, None, torch.float32)
    with pytest.raises(TypeError, match="float64"):
        ops.linear(torch.randn(3, 8).double(), packed, None, torch.float32)
    with pytest.raises(ValueError, match="int32"):
        ops.embedding(torch.tensor([1]), packed)
    with pytest.raises(ValueError, match="evenly"):
        ops.paged_attention(torch.randn(4, 5, 16), inputs.cache(ops, torch.float32), *(torch.zeros(1, 1),) * 3, 1.0, 0)
    with pytest.raises(ValueError, match=r"kv_cache must be contiguous \(7, 2, 2, 16, 20\)"):
        inputs.attend(ops, inputs.cache(ops, torch.float32).to(torch.int8))
    with pytest.raises(TypeError, match="float64"):
        inputs.attend(ops, inputs.cache(ops, torch.float32).double())


@pytest.mark.parametrize("head_dim", [8, 40, 272])
def test_head_sizes_beyond_the_kernels_are_refused_with_the_limit(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"multiples of 16 up to 256, not {head_dim}"):
        CpuOps().kv_cache_shape(4, 16, 2, head_dim, torch.int8)


def test_block_sizes_that_split_a_tile_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block size 24.*--block-size"):
        CpuOps().kv_cache_shape(4, 24, 2, 64, torch.int8)

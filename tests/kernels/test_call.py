"""How the native ops read their arguments: whose tensors they take, and what a refusal says."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.devices.cpu import _cpu
from octavo.devices.cpu.ops import CpuOps
from octavo.kernels.ops import Ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class OtherLibrarys:
    """A tensor of a library that speaks DLPack, but has no exchange API for C."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: object) -> object:
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_other_libraries_are_read_too(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20).to(dtype)
    out = torch.empty_like(x)
    _cpu.gelu(OtherLibrarys(x), OtherLibrarys(out))
    assert torch.equal(out, CpuOps().gelu(x))


def test_arrays_are_read_too() -> None:
    x, out = np.random.default_rng(0).standard_normal((3, 20), np.float32), np.empty((3, 20), np.float32)
    _cpu.scale(x, 2.0, out)
    assert np.array_equal(out, x * np.float32(2))


def test_a_parameter_is_a_tensor() -> None:
    x = torch.randn(3, 20)
    out = torch.empty_like(x)
    _cpu.scale(torch.nn.Parameter(x, requires_grad=False), 2.0, out)
    assert torch.equal(out, Ops().scale(x, 2.0))


def test_a_refusal_names_the_argument_what_is_wanted_and_what_came() -> None:
    ops, x = CpuOps(), torch.randn(4, 16)
    norm, residual = torch.randn(16), torch.randn(4, 16)
    with pytest.raises(ValueError, match=r"weight must be contiguous \(16,\) float32, not \(8,\) float32"):
        ops.rms_norm(x, norm[:8], 1e-5, torch.float32)
    with pytest.raises(ValueError, match=r"weight must be contiguous \(16,\) float32, not \(16,\) bfloat16"):
        ops.rms_norm(x, norm.bfloat16(), 1e-5, torch.float32)
    with pytest.raises(ValueError, match=r"x must be contiguous \(4, 16\), not \(64,\) float32"):
        _cpu.rms_norm(residual, x.flatten(), norm, 1e-5, x)
    with pytest.raises(ValueError, match=r"residual must be contiguous \(4, 16\) float32, .* float32, not contiguous"):
        ops.add_rms_norm(x, torch.randn(16, 4).T, norm, 1e-5, torch.float32)
    with pytest.raises(TypeError, match=r"x is of int32, but .* float32, bfloat16 and float16"):
        ops.gelu(x.int())
    with pytest.raises(TypeError, match=r"x must be a tensor, not 'x'"):
        _cpu.gelu("x", x)
    with pytest.raises(TypeError, match=r"x must be a tensor, not None"):
        _cpu.gelu(None, x)
    with pytest.raises(TypeError, match=r"factor must be a number, not 'two'"):
        _cpu.scale(x, "two", x)
    with pytest.raises(TypeError, match=r"gelu takes more than 1 arguments"):
        _cpu.gelu(x)
    with pytest.raises(TypeError, match=r"gelu takes 2 arguments, not 3"):
        _cpu.gelu(x, x, x)


def test_results_must_have_room() -> None:
    x = torch.randn(4, 16)
    for out, wanted in (
        (torch.empty(63), "64 elements float32, not"),
        (torch.empty(64, dtype=torch.bfloat16), "64 elements float32, not"),
    ):
        with pytest.raises(ValueError, match=wanted):
            _cpu.gelu(x, out)
    indices = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"out must be contiguous \(2, 16\) of 4 bytes, not \(2, 16\) float16"):
        _cpu.gather_rows(x, indices, torch.empty(2, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"row_start must be contiguous"):
        _cpu.mean_rows(x, indices[:0], torch.empty(0, 16))
    with pytest.raises(ValueError, match=r"packed must be contiguous \(256,\) float32, not \(512,\)"):
        _cpu.pack(torch.randn(16, 16), torch.empty(512))
    packed = torch.empty(256)
    with pytest.raises(ValueError, match=r"draws must be contiguous \(4, 56\) uint8, not \(3, 56\) uint8"):
        _cpu.linear(16, 16, packed, x, None, torch.zeros(3, 56, dtype=torch.uint8))


def test_a_file_takes_the_place_of_pages_within_their_bounds(tmp_path: Path) -> None:
    size = mmap.PAGESIZE
    (tmp_path / "file").write_bytes(b"x" * size)
    pages = mmap.mmap(-1, 3 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with (tmp_path / "file").open("rb") as file:
        _cpu.map_file(pages, size, size, file.fileno(), 0)
        for start, num_bytes in ((size, 3 * size), (-size, size), (3 * size, size), (0, 0)):
            with pytest.raises(ValueError, match="within the pages"):
                _cpu.map_file(pages, start, num_bytes, file.fileno(), 0)
        with pytest.raises(OSError, match="Invalid argument"):
            _cpu.map_file(pages, 1, size, file.fileno(), 0)
    assert pages[:] == bytes(size) + b"x" * size + bytes(size)

"""The providers under test: the reference, and the native kernels once for each instruction set of this CPU."""

from collections.abc import Iterator

import pytest
import torch

from octavo.devices.cpu import ops as cpu
from octavo.kernels.ops import Ops

# avx512bf16 is avx512vnni but for products of bf16, whose bits are compared instead (test_exactness.py).
NATIVE = [f"cpu-{isa}" for isa in cpu.supported_isas() if isa != "avx512bf16"]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before, torch_before = cpu.num_threads(), torch.get_num_threads()
    cpu.set_num_threads(2)
    torch.set_num_threads(1)
    yield
    cpu.set_num_threads(before)
    torch.set_num_threads(torch_before)


def make_ops(provider: str) -> Ops:
    if provider == "reference":
        return Ops()
    cpu.set_isa(provider.removeprefix("cpu-"))
    return cpu.CpuOps()


@pytest.fixture(params=["reference", *NATIVE])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """Every provider."""
    before = cpu.isa()
    yield make_ops(request.param)
    cpu.set_isa(before)


@pytest.fixture(params=NATIVE)
def native(request: pytest.FixtureRequest) -> Iterator[cpu.CpuOps]:
    """The native provider, for promises that only it makes."""
    before = cpu.isa()
    ops = make_ops(request.param)
    assert isinstance(ops, cpu.CpuOps)
    yield ops
    cpu.set_isa(before)

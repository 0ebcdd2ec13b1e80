"""A watcher in another thread sees ops get on while they run."""

import threading

import pytest
import torch

from octavo.devices.cpu import ops as cpu
from octavo.devices.cpu.ops import CpuOps
from octavo.devices.registry import open_device


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_number_changes_while_an_op_runs(num_threads: int) -> None:
    ops, before = CpuOps(), cpu.num_threads()
    cpu.set_num_threads(num_threads)
    weight = ops.pack(torch.ones(4096, 512))
    is_over = threading.Event()

    def compute() -> None:
        ops.linear(torch.ones(2048, 512), weight, None, torch.float32)
        is_over.set()

    progress = open_device("CPU").progress
    seen = {progress()}
    thread = threading.Thread(target=compute)
    thread.start()
    while not is_over.is_set():
        seen.add(progress())
    thread.join()
    cpu.set_num_threads(before)
    assert len(seen) > 5  # it ran while the op did, and not only before and after
    assert progress() == progress()

"""What memory allows, and how near the steps come, on numbers that can be worked out by hand."""

import pytest
import torch

from octavo.core.kv_groups import group_layers
from octavo.core.step import ScheduledRequest, SchedulerOutput
from octavo.devices.cpu import device
from octavo.devices.registry import open_device
from octavo.engine.memory_roof import MemoryRoof, kv_token_bytes


def step(num_computed_tokens: list[int], num_scheduled_tokens: list[int]) -> SchedulerOutput:
    numbers = enumerate(zip(num_computed_tokens, num_scheduled_tokens, strict=True))
    return SchedulerOutput(0, [ScheduledRequest(i, start, num_tokens, 1, ([],)) for i, (start, num_tokens) in numbers])


def test_one_stream_reads_every_weight_for_each_token() -> None:
    assert MemoryRoof(20e9, 200_000_000, {}).tokens_per_s == 100


def test_a_decode_step_reads_the_weights_once_and_the_keys_and_values_of_each_sequence() -> None:
    roof = MemoryRoof(1000, 400, {0: 10})
    roof.observe(step([3, 5], [1, 1]), 1.0)
    assert roof.share == pytest.approx((400 + 10 * (4 + 6)) / 1000)


def test_a_window_bounds_what_a_sequence_sees() -> None:
    roof = MemoryRoof(1000, 400, {0: 10, 4: 20})
    roof.observe(step([2, 8], [1, 1]), 1.0)
    assert roof.share == pytest.approx((400 + 10 * (3 + 9) + 20 * (3 + 4)) / 1000)


@pytest.mark.parametrize(
    "other",
    [step([0], [7]), step([0, 9], [7, 1]), step([0, 7], [7, 0]), step([], [])],
    ids=["prompt", "prompt and decode", "fork", "copies alone"],
)
def test_only_steps_of_one_token_each_count(other: SchedulerOutput) -> None:
    roof = MemoryRoof(1000, 400, {})
    roof.observe(other, 9.0)
    assert roof.share == 0
    roof.observe(step([3], [1]), 1.0)
    roof.observe(other, 9.0)
    assert roof.share == pytest.approx(0.4)


def test_a_step_that_nobody_timed_does_not_count() -> None:
    roof = MemoryRoof(1000, 400, {})
    roof.observe(step([3], [1]), 0.0)
    assert roof.share == 0


def test_the_share_follows_the_latest_steps() -> None:
    roof = MemoryRoof(1000, 400, {})
    roof.observe(step([3], [1]), 0.4)
    assert roof.share == pytest.approx(1)
    roof.observe(step([4], [1]), 4.0)
    assert roof.share == pytest.approx(0.18, abs=0.01)  # of the time that both took
    for _ in range(1000):
        roof.observe(step([5], [1]), 0.8)
    assert roof.share == pytest.approx(0.5, abs=0.001)


def test_layers_read_a_token_within_their_window() -> None:
    groups = group_layers([8, 8, None, 8, 8, 8, None])
    assert [len(group.layers) for group in groups] == [2, 2, 1, 2]
    assert kv_token_bytes(groups, 200) == {8: 500, 0: 200}


def test_what_is_read_to_measure_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def time_read(buffers: list[tuple[int, int]]) -> float:
        read.append([num_bytes for _, num_bytes in buffers])
        return 1.0 / len(read)

    monkeypatch.setattr(device._cpu, "time_read", time_read)
    monkeypatch.setattr(device, "READ_BYTES", 1000)
    tensors = [torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in (600, 600, 600)]
    rate = device.CpuDevice().read_bytes_per_s(tensors, seconds=0)
    assert read == [[600, 400, 0]]
    assert rate == 1000


def test_plain_torch_has_no_roof() -> None:
    assert open_device("REFERENCE").read_bytes_per_s([torch.zeros(4)]) is None

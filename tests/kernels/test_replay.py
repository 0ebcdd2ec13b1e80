"""Recorded ops: that a replay gives what the ops give, at any size, and refuses what they refuse."""

from collections.abc import Callable

import pytest
import torch

from octavo.devices.cpu.ops import CpuOps
from octavo.devices.cpu.replay import Arena, Replay, record, run_replays
from octavo.kernels.ops import Ops
from tests.kernels.expected import KVInputs

MOST = 40
NOT_OPS = {"place", "pack", "pack_quantized", "kv_cache_shape"}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def recorded(compute: Callable[[], torch.Tensor]) -> Replay:
    return record(compute, MOST, 3, Arena())


def rows(replay: Replay, num_rows: int, num_requests: int) -> torch.Tensor:
    replay.run(num_rows, num_requests)
    return replay.result[:num_rows]


def test_every_op_has_a_native_form_that_can_be_recorded() -> None:
    ops = {name for name in vars(Ops) if not name.startswith("_")} - NOT_OPS
    assert not [name for name in ops if name not in vars(CpuOps)]


@pytest.mark.parametrize("num_rows", [MOST, 1, 17, 0])
def test_a_replay_has_the_bits_of_the_ops_for_fewer_rows(num_rows: int) -> None:
    ops, x = CpuOps(), torch.randn(MOST, 64)
    up, down, norm = ops.pack(torch.randn(96, 64)), ops.pack(torch.randn(64, 48)), torch.rand(64)

    def compute(x: torch.Tensor) -> torch.Tensor:
        hidden = ops.rms_norm(x, norm, 1e-5, torch.float32)
        for _ in range(3):
            halves = ops.linear(hidden, up, None, torch.float32)
            hidden = ops.linear(ops.gelu(ops.silu_mul(halves)), down, None, torch.float32)
        return hidden

    replay = recorded(lambda: compute(x))
    x.normal_()
    assert len(replay) == 13
    assert torch.equal(rows(replay, num_rows, 0), compute(x[:num_rows]))


def test_several_replays_are_one_call_and_nothing_runs_if_one_is_refused() -> None:
    ops, x, indices = CpuOps(), torch.randn(MOST, 64), torch.zeros(3, dtype=torch.int32)
    weight, arena = ops.pack(torch.randn(64, 64)), Arena()
    first = record(lambda: ops.linear(x, weight, None, torch.float32), MOST, 3, arena)
    second = record(lambda: ops.gather_rows(first.result, indices), 3, 3, arena)
    indices.copy_(torch.tensor([4, 0, 9]))
    run_replays([(first.recording, 10, 1), (second.recording, 2, 0)])
    expected = ops.linear(x, weight, None, torch.float32)
    assert torch.equal(first.result[:10], expected[:10])
    assert torch.equal(second.result[:2], expected[[4, 0]])
    first.result.zero_()
    indices[1] = MOST
    with pytest.raises(IndexError, match="40"):
        run_replays([(first.recording, 10, 1), (second.recording, 2, 0)])
    assert not first.result.any()


def test_a_buffer_is_not_reused_while_a_view_of_it_is_read_later() -> None:
    ops, x = CpuOps(), torch.randn(MOST, 64)
    weight = ops.pack(torch.randn(64, 64))

    ones = torch.ones(64)

    def compute() -> torch.Tensor:
        kept = ops.linear(x, weight, None, torch.float32).view(-1, 8, 8).view(-1, 64)
        other = ops.linear(ops.linear(x, weight, None, torch.float32), weight, None, torch.float32)
        return ops.add_rms_norm(other, kept, ones, 1e-5, torch.float32)

    assert torch.equal(rows(recorded(compute), MOST, 0), compute())


def test_an_arena_reuses_what_is_no_longer_viewed() -> None:
    arena = Arena()
    first = arena.empty((4, 8), torch.float32)
    view, address = first.view(8, 4), first.data_ptr()
    del first
    other = arena.empty((4, 8), torch.float32)
    assert other.data_ptr() != address
    del view
    assert arena.empty((2, 8), torch.float32).data_ptr() == address


def test_attention_is_replayed_for_fewer_requests() -> None:
    ops = CpuOps()
    inputs = KVInputs.random([40, 40, 30], [MOST - 8, 3, 5], 4, 2, 16, torch.float32)
    cache, table = inputs.cache(ops, torch.float32), inputs.block_table()
    q = torch.cat([q[len(q) - n :] for q, n in zip(inputs.q, inputs.num_queries, strict=True)])
    starts = torch.tensor([0, *inputs.num_queries]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(inputs.lengths, dtype=torch.int32)
    replay = recorded(lambda: ops.paged_attention(q, cache, table, starts, lengths, 0.25, 0))
    for num_requests in (3, 1, 2):
        num_rows = int(starts[num_requests])
        few = ops.paged_attention(
            q[:num_rows], cache, table[:num_requests], starts[: num_requests + 1], lengths[:num_requests], 0.25, 0
        )
        assert torch.equal(rows(replay, num_rows, num_requests), few)
    lengths[1] = 10_000
    with pytest.raises(IndexError, match="request 1 has 3 queries, seq_len 10000"):
        replay.run(MOST, 3)


def test_an_index_outside_its_tensor_is_an_error_at_replay() -> None:
    ops, ids = CpuOps(), torch.zeros(MOST, dtype=torch.int32)
    weight = ops.pack(torch.randn(50, 64))
    replay = recorded(lambda: ops.embedding(ids, weight))
    ids[9] = 50
    assert torch.equal(rows(replay, 9, 0), ops.embedding(ids[:9], weight))
    with pytest.raises(IndexError, match=r"token_ids\[9\] is 50, outside \[0, 50\)"):
        replay.run(10, 0)
    with pytest.raises(IndexError, match="41 rows and 0 requests was recorded for 40 and 3"):
        replay.run(41, 0)


def test_what_torch_computes_is_refused_and_recording_ends() -> None:
    ops, x = CpuOps(), torch.randn(MOST, 64)
    with pytest.raises(RuntimeError, match="add is torch's"):
        recorded(lambda: ops.gelu(x) + x)
    with pytest.raises(RuntimeError, match="contiguous is torch's"):
        recorded(lambda: ops.gelu(x.T.contiguous()))
    with pytest.raises(RuntimeError, match="39 rows or requests can't be recorded in a step of 40"):
        recorded(lambda: ops.l2_normalize(x[:39]))
    assert ops.gelu(x).abs().sum() > 0

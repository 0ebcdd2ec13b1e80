"""A step's inputs on every device: from what the scheduler gave, and from what was drawn in the steps before."""

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.step import GivenTokens, NewRequest, ScheduledRequest, SchedulerOutput
from octavo.devices.device import StepRoom, StepTensors
from octavo.devices.host_buffers import HostBuffers
from octavo.devices.registry import open_device
from octavo.kernels.sampling import GOOD, NOT_FINITE
from octavo.runner.input_batch import InputBatch
from octavo.sampling_params import SamplingParams

MakeBatch = Callable[..., InputBatch]
DEVICES = ["reference", "cpu"]


def _batch(device: str, num_rows: int, max_model_len: int, num_groups: int = 1, num_logits: int = 0) -> InputBatch:
    room = StepRoom(32, num_rows, num_logits or num_rows, max_model_len, 16, num_groups, vocab_size=100)
    return InputBatch(open_device(device).make_step_buffers(room))


@pytest.fixture(params=DEVICES)
def make_batch(request: pytest.FixtureRequest) -> MakeBatch:
    return lambda *sizes, **more: _batch(request.param, *sizes, **more)


def _buffers(batch: InputBatch) -> HostBuffers:
    assert isinstance(batch.buffers, HostBuffers)
    return batch.buffers


def _add(batch: InputBatch, request_id: int, token_ids: Iterable[int]) -> int:
    return batch.add(NewRequest(request_id, list(token_ids), SamplingParams(), seed=0))


def _step(ids, computed, scheduled, blocks, num_logits, reset=(), given=()):  # type: ignore[no-untyped-def]
    """blocks: new ones of each request, in one group or in each of several."""
    tables = [table if isinstance(table, tuple) else (table,) for table in blocks]
    columns = zip(ids, computed, scheduled, map(int, num_logits), tables, strict=True)
    entries = [ScheduledRequest(*entry) for entry in columns]
    return SchedulerOutput(0, entries, reset_request_ids=list(reset), given_tokens=list(given))


def _fill(batch: InputBatch, step: SchedulerOutput) -> StepTensors:
    batch.apply(step)
    size, _ = batch.fill(step.entries)
    return batch.buffers.tensors(size)


def _draw(batch: InputBatch, *token_ids: int, status: int = GOOD) -> tuple[list[list[int]], bool]:
    """What is accepted when a step draws these; the last of them with this status."""
    draws = _buffers(batch).draws[: len(token_ids)]
    draws["token_id"], draws["status"] = token_ids, GOOD
    draws["status"][-1:] = status
    return _buffers(batch).append()


def _tables(inputs: StepTensors, num_blocks: int) -> list[list[list[int]]]:
    return [table[:, :num_blocks].tolist() for table in inputs.block_tables]


def test_a_mixed_step_packs_chunks_and_decodes_one_after_the_other(make_batch: MakeBatch) -> None:
    batch = make_batch(4, 64)
    _add(batch, 10, range(100, 120))
    _add(batch, 11, range(200, 203))
    inputs = _fill(batch, _step([10, 11], [0, 0], [17, 3], [[5, 2], [7]], [False, True]))
    assert inputs.input_ids.tolist() == [*range(100, 117), 200, 201, 202]
    assert inputs.positions.tolist() == [*range(17), 0, 1, 2]
    assert [s.tolist() for s in inputs.slot_mappings] == [[*range(80, 96), 32, 112, 113, 114]]
    assert inputs.query_start.tolist() == [0, 17, 20]
    assert inputs.seq_lens.tolist() == [17, 3]
    assert inputs.logits_rows.tolist() == [19]
    assert _draw(batch, 250) == ([[250]], True)
    inputs = _fill(batch, _step([10, 11], [17, 3], [3, 1], [[], []], [True, True]))
    assert inputs.input_ids.tolist() == [117, 118, 119, 250]
    assert inputs.logits_rows.tolist() == [2, 3]
    assert _tables(inputs, 2) == [[[5, 2], [7, 0]]]


def test_a_resumed_request_keeps_its_tokens_and_starts_its_table_anew(make_batch: MakeBatch) -> None:
    batch = make_batch(1, 64)
    row = _add(batch, 1, range(20))
    step = _step([1], [0], [20], [[3, 4]], [True])
    batch.apply(step)
    assert batch.fill(step.entries)[1] == [row]
    assert _draw(batch, 99, status=NOT_FINITE) == ([[99]], False)
    inputs = _fill(batch, _step([1], [0], [21], [[8, 9]], [True], reset=[1]))
    assert inputs.input_ids.tolist() == [*range(20), 99]
    assert _tables(inputs, 2) == [[[8, 9]]]


def test_each_group_has_a_table_and_slots_of_its_own(make_batch: MakeBatch) -> None:
    batch = make_batch(2, 64, num_groups=2)
    _add(batch, 1, range(20))
    _add(batch, 2, range(3))
    inputs = _fill(batch, _step([1, 2], [16, 0], [4, 3], [([-1, 4], [3, 5]), ([1], [2])], [True, True]))
    assert _tables(inputs, 2) == [[[-1, 4], [1, 0]], [[3, 5], [2, 0]]]
    assert [s.tolist() for s in inputs.slot_mappings] == [
        [64, 65, 66, 67, 16, 17, 18],
        [80, 81, 82, 83, 32, 33, 34],
    ]
    assert all(tensor.is_contiguous() for tensor in (*inputs.block_tables, *inputs.slot_mappings))


def test_drafts_are_given_and_the_longest_run_of_those_that_are_drawn_is_accepted(make_batch: MakeBatch) -> None:
    batch = make_batch(2, 64, num_logits=8)
    _add(batch, 1, range(10, 14))
    _add(batch, 2, range(20, 23))
    given = [GivenTokens(1, 4, [50, 51]), GivenTokens(2, 3, [60])]
    inputs = _fill(batch, _step([1, 2], [3, 0], [3, 4], [[5], [7]], [3, 2], given=given))
    assert inputs.input_ids.tolist() == [13, 50, 51, 20, 21, 22, 60]
    assert inputs.logits_rows.tolist() == [0, 1, 2, 5, 6]
    assert _buffers(batch).draws["position"][:5].tolist() == [4, 5, 6, 3, 4]
    assert _draw(batch, 50, 99, 98, 60, 61) == ([[50, 99], [60, 61]], True)
    inputs = _fill(batch, _step([1, 2], [5, 4], [1, 1], [[], []], [1, 1]))  # what was taken back is written over
    assert inputs.input_ids.tolist() == [99, 61]
    assert inputs.positions.tolist() == [5, 4]


def test_a_draw_that_fails_ends_what_is_accepted(make_batch: MakeBatch) -> None:
    batch = make_batch(1, 64, num_logits=8)
    _add(batch, 1, range(10, 14))
    step = _step([1], [3], [3], [[5]], [3], given=[GivenTokens(1, 4, [50, 51])])
    _fill(batch, step)
    assert _draw(batch, 50, 51, status=NOT_FINITE) == ([[50, 51]], False)
    _fill(batch, step)
    assert _draw(batch, 7, 51, status=NOT_FINITE) == ([[7]], True)  # behind a rejected draft it does not count


def test_rows_grow_when_preempted_requests_keep_theirs(make_batch: MakeBatch) -> None:
    batch = make_batch(2, 32)
    rows = [_add(batch, i, [i]) for i in range(5)]
    assert len(set(rows)) == 5
    assert [int(_buffers(batch).tables.token_ids[row, 0]) for row in rows] == [0, 1, 2, 3, 4]
    assert batch.remove(3) == rows[3]
    assert _add(batch, 9, [9]) == rows[3]
    assert batch.remove(1234) is None


def test_growing_keeps_tokens_and_tables_and_commits_no_memory_for_the_rest(make_batch: MakeBatch) -> None:
    batch = make_batch(2, 4_000_000)
    _add(batch, 0, range(10, 30))
    _fill(batch, _step([0], [0], [20], [[3, 4]], [True]))
    _draw(batch, 77)
    before = _resident_bytes()
    for i in range(1, 9):
        _add(batch, i, [i])
    assert _resident_bytes() - before < 64 << 20  # of 272 MB, for huge pages are committed whole
    inputs = _fill(batch, _step([0, 8], [19, 0], [2, 1], [[], [6]], [True, True]))
    assert inputs.input_ids.tolist() == [29, 77, 8]
    assert _tables(inputs, 2) == [[[3, 4], [6, 0]]]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_what_there_is_no_room_for_is_an_error(make_batch: MakeBatch) -> None:
    batch = make_batch(2, 64)
    for i in range(3):
        _add(batch, i, range(40))
    steps = [
        _step([0, 1, 2], [0, 0, 0], [1, 1, 1], [[0], [1], [2]], [True] * 3),  # requests
        _step([0, 1], [0, 0], [17, 16], [[0, 1], [2]], [False] * 2),  # tokens
        _step([0], [60], [30], [[0]], [True]),  # length
        _step([0, 1], [0, 0], [3, 3], [[0], [2]], [2, 2]),  # rows of logits
        _step([0], [0], [1], [[0]], [2]),  # more of them than tokens
    ]
    for step in steps:
        with pytest.raises(IndexError):
            batch.fill(step.entries)


@given(data=st.data())
def test_both_fillers_fill_in_the_same(data: st.DataObject) -> None:
    batches = [_batch(device, 8, 64, num_groups=2, num_logits=24) for device in DEVICES]
    num_requests = data.draw(st.integers(1, 8))
    ids = list(range(num_requests))
    computed = data.draw(st.lists(st.integers(0, 50), min_size=num_requests, max_size=num_requests))
    scheduled = data.draw(st.lists(st.integers(0, 4), min_size=num_requests, max_size=num_requests))
    num_logits = [data.draw(st.integers(0, min(max(num, 1), 3))) for num in scheduled]
    tables = [([10 * i, 10 * i + 1, 3, 4], [5, 6, 7, 10 * i + 8]) for i in ids]
    step = _step(ids, computed, scheduled, tables, num_logits)
    choices = random.Random(data.draw(st.integers(0, 99)))
    results = []
    for batch in batches:
        for i in ids:
            _add(batch, i, [100 * i + position for position in range(60)])
        inputs = _fill(batch, step)
        results.append(inputs)
    draws = []
    for i, start, num, rows in zip(ids, computed, scheduled, num_logits, strict=True):
        drafts = [100 * i + start + num - rows + 1 + j for j in range(rows)]
        draws += [(draft if choices.random() < 0.7 else 7000, int(choices.random() < 0.1)) for draft in drafts]
    values = []
    for batch, inputs in zip(batches, results, strict=True):
        buffers = _buffers(batch)
        for draw, (token_id, status) in zip(buffers.draws, draws, strict=False):
            draw["token_id"], draw["status"] = token_id, status
        # Of a table what the request's tokens need; beyond may be anything.
        used = [table[i, : -(-end // 16)] for table in inputs.block_tables for i, end in enumerate(inputs.seq_lens)]
        tensors = (inputs.input_ids, inputs.positions, *inputs.slot_mappings, *used, inputs.query_start)
        more = (inputs.seq_lens, inputs.logits_rows, buffers.draws["position"][: len(draws)])
        values.append([buffers.append(), *(tensor.tolist() for tensor in (*tensors, *more, buffers.tables.token_ids))])
    assert values[0] == values[1]

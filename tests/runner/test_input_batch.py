from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.step import ScheduledRequest, SchedulerOutput
from octavo.devices.cpu.ops import CpuOps
from octavo.kernels.ops import Ops
from octavo.kernels.sampling import NOT_FINITE
from octavo.kernels.step_inputs import StepArrays
from octavo.runner.input_batch import InputBatch

MakeBatch = Callable[..., InputBatch]


@pytest.fixture(params=[Ops, CpuOps])
def make_batch(request: pytest.FixtureRequest) -> MakeBatch:
    def make(num_rows: int, max_model_len: int, num_groups: int = 1) -> InputBatch:
        return InputBatch(request.param(), StepArrays.make(32, num_rows, num_groups, 5), max_model_len, block_size=16)

    return make


def _step(ids: list[int], computed: list[int], scheduled: list[int], blocks: list[list[int]], samples: list[bool]):  # type: ignore[no-untyped-def]
    return _step_of_groups(ids, computed, scheduled, [(b,) for b in blocks], samples)


def _step_of_groups(ids, computed, scheduled, tables, samples, reset=()):  # type: ignore[no-untyped-def]
    columns = zip(ids, computed, scheduled, map(int, samples), tables, strict=True)
    return SchedulerOutput(0, [ScheduledRequest(*entry) for entry in columns], reset_request_ids=list(reset))


def test_a_mixed_step_packs_chunks_and_decodes_one_after_the_other(make_batch: MakeBatch) -> None:
    batch = make_batch(4, 64)
    batch.add(10, range(100, 120))
    batch.add(11, range(200, 203))
    first = _step([10, 11], [0, 0], [17, 3], [[5, 2], [7]], [False, True])
    batch.apply(first)
    inputs, _ = batch.prepare(first)
    assert inputs.input_ids.tolist() == [*range(100, 117), 200, 201, 202]
    assert inputs.positions.tolist() == [*range(17), 0, 1, 2]
    assert [s.tolist() for s in inputs.slot_mappings] == [[*range(80, 96), 32, 112, 113, 114]]
    assert inputs.query_start.tolist() == [0, 17, 20]
    assert inputs.seq_lens.tolist() == [17, 3]
    assert inputs.logits_rows.tolist() == [19]
    inputs.draws["token_id"] = 250
    assert batch.append() == ([250], True)
    second = _step([10, 11], [17, 3], [3, 1], [[], []], [True, True])
    batch.apply(second)
    inputs, _ = batch.prepare(second)
    assert inputs.input_ids.tolist() == [117, 118, 119, 250]
    assert inputs.logits_rows.tolist() == [2, 3]
    assert [t.tolist() for t in inputs.block_tables] == [[[5, 2], [7, 0]]]


def test_a_resumed_request_keeps_its_tokens_and_starts_its_table_anew(make_batch: MakeBatch) -> None:
    batch = make_batch(1, 64)
    batch.add(1, range(20))
    step = _step([1], [0], [20], [[3, 4]], [True])
    batch.apply(step)
    inputs, rows = batch.prepare(step)
    assert rows == [batch.row_of[1]]
    inputs.draws["token_id"], inputs.draws["status"] = 99, NOT_FINITE
    assert batch.append() == ([99], False)
    again = _step_of_groups([1], [0], [21], [([8, 9],)], [True], reset=[1])
    batch.apply(again)
    inputs, _ = batch.prepare(again)
    assert inputs.input_ids.tolist() == [*range(20), 99]
    assert [t.tolist() for t in inputs.block_tables] == [[[8, 9]]]


def test_each_group_has_a_table_and_slots_of_its_own(make_batch: MakeBatch) -> None:
    batch = make_batch(2, 64, num_groups=2)
    batch.add(1, range(20))
    batch.add(2, range(3))
    step = _step_of_groups([1, 2], [16, 0], [4, 3], [([-1, 4], [3, 5]), ([1], [2])], [True, True])
    batch.apply(step)
    inputs, _ = batch.prepare(step)
    assert [t.tolist() for t in inputs.block_tables] == [[[-1, 4], [1, 0]], [[3, 5], [2, 0]]]
    assert [s.tolist() for s in inputs.slot_mappings] == [
        [64, 65, 66, 67, 16, 17, 18],
        [80, 81, 82, 83, 32, 33, 34],
    ]
    assert all(array.flags.c_contiguous for array in (*inputs.block_tables, *inputs.slot_mappings))


def test_rows_grow_when_preempted_requests_keep_theirs(make_batch: MakeBatch) -> None:
    batch = make_batch(2, 32)
    rows = [batch.add(i, [i]) for i in range(5)]
    assert len(set(rows)) == 5
    assert [int(batch.token_ids[row, 0]) for row in rows] == [0, 1, 2, 3, 4]
    assert batch.remove(3) == rows[3]
    assert batch.add(9, [9]) == rows[3]
    assert batch.remove(1234) is None


def test_what_there_is_no_room_for_is_an_error(make_batch: MakeBatch) -> None:
    batch = make_batch(2, 64)
    for i in range(3):
        batch.add(i, range(40))
    steps = [
        _step([0, 1, 2], [0, 0, 0], [1, 1, 1], [[0], [1], [2]], [True] * 3),  # requests
        _step([0, 1], [0, 0], [17, 16], [[0, 1], [2]], [False] * 2),  # tokens
        _step([0], [60], [30], [[0]], [True]),  # length
    ]
    for step in steps:
        with pytest.raises(IndexError):
            batch.prepare(step)


@given(data=st.data())
def test_both_fillers_fill_in_the_same(data: st.DataObject) -> None:
    batches = [InputBatch(ops, StepArrays.make(64, 8, 2, 5), 64, 16) for ops in (Ops(), CpuOps())]
    num_requests = data.draw(st.integers(1, 8))
    ids = list(range(num_requests))
    computed = data.draw(st.lists(st.integers(0, 50), min_size=num_requests, max_size=num_requests))
    scheduled = data.draw(st.lists(st.integers(0, 8), min_size=num_requests, max_size=num_requests))
    samples = data.draw(st.lists(st.booleans(), min_size=num_requests, max_size=num_requests))
    tables = [([10 * i, 10 * i + 1, 3, 4], [5, 6, 7, 10 * i + 8]) for i in ids]
    step = _step_of_groups(ids, computed, scheduled, tables, samples)
    results = []
    for batch in batches:
        for i in ids:
            batch.add(i, [100 * i + position for position in range(60)])
        batch.apply(step)
        inputs, _ = batch.prepare(step)
        inputs.draws["token_id"] = [7000 + i for i in range(inputs.num_sampled)]
        appended = batch.append()
        # Of a table what the request's tokens need; beyond may be anything.
        used = [table[i, : -(-end // 16)] for table in inputs.block_tables for i, end in enumerate(inputs.seq_lens)]
        tokens = (inputs.input_ids, inputs.positions, *inputs.slot_mappings, *used)
        requests = (inputs.query_start, inputs.seq_lens, inputs.rows)
        sampled = (inputs.logits_rows, inputs.sampled_rows, inputs.draws["position"], batch.token_ids)
        results.append([appended, *(array.tolist() for array in (*tokens, *requests, *sampled))])
    assert results[0] == results[1]

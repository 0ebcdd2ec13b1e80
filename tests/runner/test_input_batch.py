import numpy as np

from octavo.core.step import SchedulerOutput
from octavo.runner.input_batch import InputBatch


def _step(ids: list[int], computed: list[int], scheduled: list[int], blocks: list[list[int]], samples: list[bool]):  # type: ignore[no-untyped-def]
    return SchedulerOutput(0, ids, computed, scheduled, [(b,) for b in blocks], samples)


def test_a_mixed_step_packs_chunks_and_decodes_one_after_the_other() -> None:
    batch = InputBatch(num_rows=4, max_model_len=64, block_size=16)
    batch.add(10, range(100, 120))
    batch.add(11, range(200, 203))
    first = _step([10, 11], [0, 0], [17, 3], [[5, 2], [7]], [False, True])
    batch.apply(first)
    inputs = batch.prepare(first)
    assert inputs.input_ids.tolist() == [*range(100, 117), 200, 201, 202]
    assert inputs.positions.tolist() == [*range(17), 0, 1, 2]
    assert [s.tolist() for s in inputs.slot_mappings] == [[*range(80, 96), 32, 112, 113, 114]]
    assert inputs.query_start.tolist() == [0, 17, 20]
    assert inputs.seq_lens.tolist() == [17, 3]
    assert inputs.logits_rows.tolist() == [19]
    batch.append(inputs, np.array([250]))
    second = _step([10, 11], [17, 3], [3, 1], [[], []], [True, True])
    batch.apply(second)
    inputs = batch.prepare(second)
    assert inputs.input_ids.tolist() == [117, 118, 119, 250]
    assert inputs.logits_rows.tolist() == [2, 3]
    assert [t.tolist() for t in inputs.block_tables] == [[[5, 2], [7, 0]]]


def test_a_resumed_request_keeps_its_tokens_and_starts_its_table_anew() -> None:
    batch = InputBatch(num_rows=1, max_model_len=64, block_size=16)
    batch.add(1, range(20))
    step = _step([1], [0], [20], [[3, 4]], [True])
    batch.apply(step)
    batch.append(batch.prepare(step), np.array([99]))
    again = SchedulerOutput(1, [1], [0], [21], [([8, 9],)], [True], reset_request_ids=[1])
    batch.apply(again)
    inputs = batch.prepare(again)
    assert inputs.input_ids.tolist() == [*range(20), 99]
    assert [t.tolist() for t in inputs.block_tables] == [[[8, 9]]]


def test_each_group_has_a_table_and_slots_of_its_own() -> None:
    batch = InputBatch(num_rows=2, max_model_len=64, block_size=16, num_groups=2)
    batch.add(1, range(20))
    batch.add(2, range(3))
    step = SchedulerOutput(0, [1, 2], [16, 0], [4, 3], [([-1, 4], [3, 5]), ([1], [2])], [True, True])
    batch.apply(step)
    inputs = batch.prepare(step)
    assert [t.tolist() for t in inputs.block_tables] == [[[-1, 4], [1, 0]], [[3, 5], [2, 0]]]
    assert [s.tolist() for s in inputs.slot_mappings] == [
        [64, 65, 66, 67, 16, 17, 18],
        [80, 81, 82, 83, 32, 33, 34],
    ]
    assert all(array.flags.c_contiguous for array in (*inputs.block_tables, *inputs.slot_mappings))


def test_rows_grow_when_preempted_requests_keep_theirs() -> None:
    batch = InputBatch(num_rows=2, max_model_len=32, block_size=16)
    rows = [batch.add(i, [i]) for i in range(5)]
    assert len(set(rows)) == 5
    assert [int(batch.token_ids[row, 0]) for row in rows] == [0, 1, 2, 3, 4]
    assert batch.remove(3) == rows[3]
    assert batch.add(9, [9]) == rows[3]
    assert batch.remove(1234) is None

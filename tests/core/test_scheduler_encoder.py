"""Without KV groups, as for encoders: prompts are scheduled whole, hold no blocks, and end with their embedding."""

from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import ModelRunnerOutput, RequestDelta, SchedulerOutput
from octavo.sampling_params import SamplingParams


def make_scheduler(max_num_seqs: int = 4, max_num_batched_tokens: int = 20) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=0,
            block_size=16,
            group_windows=(),
            enable_prefix_caching=False,
        )
    )


def add(scheduler: Scheduler, request_id: int, num_tokens: int) -> None:
    params, nothing = SamplingParams(max_tokens=0), frozenset[int]()
    scheduler.add_request(Request(request_id, [5] * num_tokens, params, 0, nothing, nothing, seed=0))
    scheduler.check()


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    step = scheduler.schedule()
    scheduler.check()
    return step


def collect(scheduler: Scheduler, step: SchedulerOutput, failed: dict[int, str] | None = None) -> list[RequestDelta]:
    failed = failed or {}
    embeddings = {i: bytes([i]) for i in step.request_ids if i not in failed}
    deltas = scheduler.update(step, ModelRunnerOutput([], [], [], failed=failed, embeddings=embeddings))
    scheduler.check()
    return deltas


def test_prompts_are_scheduled_whole_while_the_budget_lasts() -> None:
    scheduler = make_scheduler()
    for request_id, num_tokens in enumerate([8, 11, 2, 20]):
        add(scheduler, request_id, num_tokens)
    steps = []
    while (step := schedule(scheduler)).request_ids:
        steps.append({entry.request_id: entry.num_tokens for entry in step.entries})
        assert all(entry.num_logits for entry in step.entries)
        assert not any(any(entry.new_block_ids) for entry in step.entries)
        collect(scheduler, step)
    assert steps == [{0: 8, 1: 11}, {2: 2}, {3: 20}]  # first come, first served: 2 does not wait for the next but one


def test_no_more_requests_than_max_num_seqs_are_in_a_step() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in range(3):
        add(scheduler, request_id, 1)
    assert schedule(scheduler).request_ids == [0, 1]


def test_the_embedding_is_the_request_s_one_delta() -> None:
    scheduler = make_scheduler()
    add(scheduler, 7, 3)
    (delta,) = collect(scheduler, schedule(scheduler))
    assert delta == RequestDelta(7, [], finish_reason="stop", embedding=b"\x07")
    stats = scheduler.stats()
    assert (stats.num_finished["stop"], stats.num_prompt_tokens, stats.num_generation_tokens) == (1, 3, 0)
    assert (stats.num_used_blocks, stats.num_blocks, stats.prefix_cache_queries) == (0, 0, 0)
    assert not scheduler.has_unfinished_requests


def test_two_steps_in_flight_carry_different_requests() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 20)
    add(scheduler, 1, 20)
    first, second = schedule(scheduler), schedule(scheduler)
    assert (first.request_ids, second.request_ids) == ([0], [1])
    assert [delta.request_id for step in (first, second) for delta in collect(scheduler, step)] == [0, 1]


def test_an_aborted_request_gives_nothing_and_a_failed_one_its_reason() -> None:
    scheduler = make_scheduler()
    for request_id in range(3):
        add(scheduler, request_id, 2)
    step = schedule(scheduler)
    scheduler.abort(0)
    failed, good = collect(scheduler, step, failed={1: "not finite"})
    assert (failed.request_id, failed.finish_reason, failed.error) == (1, "error", "not finite")
    assert good.request_id == 2


def test_a_step_that_raised_fails_its_own_requests_only() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 20)
    add(scheduler, 1, 20)
    first, second = schedule(scheduler), schedule(scheduler)
    deltas = scheduler.fail_step(first, "the device is on fire")
    scheduler.check()
    assert [(delta.request_id, delta.error) for delta in deltas] == [(0, "the device is on fire")]
    assert [delta.request_id for delta in collect(scheduler, second)] == [1]

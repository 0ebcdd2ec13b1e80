"""Beam searches in the engine, over the fake device: whatever else runs, whatever is short, the beams are those of a
search by itself."""

import random

import pytest

from octavo.core.beam_search import BeamSearch
from octavo.core.request import RequestLimits
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import RequestDelta, TokenLogprobs
from octavo.engine.llm_engine import LLMEngine
from octavo.errors import InvalidRequestError
from octavo.ipc.messages import AddRequest
from octavo.sampling_params import BeamSearchOptions, SamplingParams
from tests.core.fake_executor import VOCAB_SIZE, FakeExecutor, naive_beams

BLOCK = 4
EOS = frozenset({3})
in_flight = pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])


def make_engine(
    num_steps_in_flight: int = 1,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    num_swap_blocks: int = 0,
) -> tuple[LLMEngine, FakeExecutor]:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_swap_blocks=num_swap_blocks,
        preemption_mode="swap",
    )
    limits = RequestLimits(VOCAB_SIZE, 512, config.kv_capacity_tokens)
    executor = FakeExecutor(num_blocks, BLOCK, num_swap_blocks=num_swap_blocks)
    return LLMEngine(Scheduler(config), executor, limits, EOS, num_steps_in_flight), executor


def beam_params(width: int, max_tokens: int = 8, **options: object) -> SamplingParams:
    return SamplingParams(n=width, max_tokens=max_tokens, beam_search=BeamSearchOptions(**options))  # type: ignore[arg-type]


def run(engine: LLMEngine, max_steps: int = 3000) -> dict[int, RequestDelta]:
    """The last delta of each request."""
    ends: dict[int, RequestDelta] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests:
            return ends
        ends |= {delta.request_id: delta for delta in engine.step() if delta.finish_reason is not None}
        engine.scheduler.check()
    raise AssertionError("no end in sight")


@in_flight
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 11])
@pytest.mark.parametrize("options", [{}, {"length_penalty": -1.0}, {"early_stopping": True}])
def test_beams_are_those_of_the_naive_search(options: dict[str, object], length: int, num_steps_in_flight: int) -> None:
    engine, _ = make_engine(num_steps_in_flight)
    prompt, params = list(range(length)), beam_params(3, **options)
    engine.add_request(AddRequest(request_id=0, prompt_token_ids=prompt, sampling_params=params))
    ends = run(engine)
    assert [ends[i].new_token_ids for i in range(3)] == naive_beams(prompt, params, EOS)
    assert engine.stats().num_used_blocks == 0
    assert engine.stats().num_generation_tokens >= sum(len(delta.new_token_ids) for delta in ends.values())


def test_beams_share_what_they_have_in_common() -> None:
    engine, executor = make_engine()
    engine.add_request(AddRequest(request_id=0, prompt_token_ids=[9] * 30, sampling_params=beam_params(4, 3)))
    most = 0
    while engine.has_unfinished_requests:
        engine.step()
        most = max(most, engine.stats().num_used_blocks)
    assert most <= 7 + 4
    assert sum(step.num_tokens for step in executor.steps) == 30 + 2 * 4


@in_flight
@pytest.mark.parametrize(
    "shortage",
    [{"num_blocks": 7}, {"num_blocks": 7, "num_swap_blocks": 9}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 5}],
)
def test_beams_that_have_to_take_turns_are_the_same(shortage: dict[str, int], num_steps_in_flight: int) -> None:
    engine, _ = make_engine(num_steps_in_flight, **({"max_num_seqs": 5} | shortage))
    prompt, params = [5, 6, 7, 8, 9], beam_params(4, 12)
    engine.add_request(AddRequest(request_id=0, prompt_token_ids=prompt, sampling_params=params))
    ends = run(engine)
    assert [ends[i].new_token_ids for i in range(4)] == naive_beams(prompt, params, EOS)


@pytest.mark.parametrize("seed", range(12))
def test_beams_amid_random_traffic(seed: int) -> None:
    rng = random.Random(seed)
    engine, executor = make_engine(
        rng.choice([1, 2, 4]),
        rng.randint(8, 30),
        rng.randint(2, 6),
        rng.randint(6, 20),
        num_swap_blocks=rng.choice([0, 5, 30]),
    )
    searches: dict[int, tuple[list[int], SamplingParams]] = {}
    next_id, ends, aborted = 0, dict[int, RequestDelta](), set[int]()
    for _ in range(25):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.5:
            params = beam_params(rng.randint(1, 4), rng.randint(1, 9), length_penalty=rng.choice([-1.0, 0.0, 1.0]))
            searches[next_id] = prompt, params
        else:
            params = SamplingParams(n=rng.randint(1, 3), max_tokens=rng.randint(0, 9))
        engine.add_request(AddRequest(request_id=next_id, prompt_token_ids=prompt, sampling_params=params))
        next_id += params.n
        for _ in range(rng.randint(0, 6)):
            ends |= {delta.request_id: delta for delta in engine.step() if delta.finish_reason is not None}
            engine.scheduler.check()
        if rng.random() < 0.2:
            aborted.add(victim := rng.randrange(next_id))
            engine.abort(victim)
            engine.scheduler.check()
        if rng.random() < 0.1:
            executor.failing_step_ids.add(len(executor.steps))
    ends |= run(engine)
    assert engine.stats().num_used_blocks == 0
    for first_id, (prompt, params) in searches.items():
        ids = range(first_id, first_id + params.n)
        if all(ends[i].finish_reason in ("stop", "length") for i in ids if i in ends) and first_id in ends:
            assert [ends[i].new_token_ids for i in ids] == naive_beams(prompt, params, EOS)
        else:
            assert not any(i in ends and ends[i].finish_reason != "error" for i in ids)
            assert aborted & set(ids) or ends[first_id].finish_reason == "error"


def test_a_beam_that_fails_ends_its_search_and_nothing_else() -> None:
    engine, executor = make_engine()
    engine.add_request(AddRequest(request_id=0, prompt_token_ids=[1, 2], sampling_params=beam_params(3)))
    engine.add_request(AddRequest(request_id=3, prompt_token_ids=[1, 2], sampling_params=beam_params(2)))
    engine.step()
    executor.failing_request_ids = {1}
    ends = run(engine)
    assert [ends[i].finish_reason for i in range(3)] == ["error"] * 3
    assert [ends[i].new_token_ids for i in (3, 4)] == naive_beams([1, 2], beam_params(2), EOS)


def test_aborting_one_beam_aborts_the_search() -> None:
    engine, _ = make_engine(num_steps_in_flight=2)
    engine.add_request(AddRequest(request_id=0, prompt_token_ids=[1, 2], sampling_params=beam_params(3)))
    engine.step()
    engine.abort(1)
    assert run(engine) == {}
    assert engine.stats().num_finished["abort"] == 3


def test_more_beams_than_the_vocabulary_has_room_for_are_refused() -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="n must be smaller for beam search, got 21") as caught:
        engine.add_request(AddRequest(request_id=0, prompt_token_ids=[1], sampling_params=beam_params(21)))
    assert caught.value.param == "n"


def test_beams_with_many_stops_are_refused_by_the_limit_and_others_are_not() -> None:
    """What a step looks at grows with the product of n and the stop tokens, and everybody waits for it."""
    engine, _ = make_engine()
    engine.limits = RequestLimits(10_000, 512, 64 * BLOCK)
    params = {"n": 16, "max_tokens": 4, "beam_search": BeamSearchOptions()}
    refused = SamplingParams(stop_token_ids=tuple(range(4, 3004)), **params)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"looks at 48272 continuations .* may have 32768") as caught:
        engine.add_request(AddRequest(request_id=0, prompt_token_ids=[1], sampling_params=refused))
    assert caught.value.param == "stop_token_ids"
    assert not engine.has_unfinished_requests
    taken = SamplingParams(stop_token_ids=tuple(range(4, 1004)), **params)  # type: ignore[arg-type]
    engine.add_request(AddRequest(request_id=0, prompt_token_ids=[1], sampling_params=taken))
    assert engine.has_unfinished_requests
    widest = SamplingParams(n=128, max_tokens=4, beam_search=BeamSearchOptions())
    engine.add_request(AddRequest(request_id=16, prompt_token_ids=[1], sampling_params=widest))


def test_few_candidates_choose_what_all_of_them_choose() -> None:
    rng = random.Random(0)
    for width, num_ends in [(1, 0), (1, 5), (3, 1), (4, 7), (6, 20)]:
        ends = frozenset(range(num_ends))
        searches = [BeamSearch(width, BeamSearchOptions(early_stopping="never"), 6, ends) for _ in range(2)]
        while not searches[0].is_done:
            rows = [rng.sample(range(-600, 0), 60) for _ in range(width)]
            tops = [sorted(enumerate(value / 100 for value in row), key=lambda pair: -pair[1]) for row in rows]
            moves = []
            for search, num_shown in zip(searches, (60, searches[0].num_candidates), strict=True):
                moves.append(search.advance([TokenLogprobs(top[0][1], 1, top[:num_shown]) for top in tops]))
            assert moves[0] == moves[1]
        outputs = [[(found.beam.token_ids, found.score) for found in search.hypotheses] for search in searches]
        assert outputs[0] == outputs[1]

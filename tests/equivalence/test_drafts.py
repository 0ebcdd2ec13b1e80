"""Drafts change no bit of a result, right, wrong or partly right: verifying is sampling and comparing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.core.step import SchedulerOutput
from tests.tiny_models import make_folder

PROMPTS = [[2 + (37 * i + 11 * row) % 380 for i in range(length)] for row, length in enumerate((1, 20, 16, 33, 7, 40))]
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 3},
    {"temperature": 0.0, "frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 5, "logprobs": 3, "logit_bias": {9: 1.5}},
    {"temperature": 0.0, "logprobs": 2, "min_tokens": 8, "stop_token_ids": [85, 73, 338, 107, 251, 12, 40]},
    {"temperature": 0.7, "seed": 11, "bad_words_token_ids": ((85,), (73, 338), (5, 6, 7)), "logprobs": 1},
]
NUM_TOKENS = 24
Results = list[tuple[Any, Any]]
Guess = Callable[[list[int], int], list[int]]
"""From a request's tokens without drafts, and how many of them there are so far, to drafts."""


def run(llm: LLM, params: list[SamplingParams]) -> Results:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in outputs]


def run_with_drafts(llm: LLM, params: list[SamplingParams], expected: Results, guess: Guess) -> tuple[Results, int]:
    """Also returns how many steps it took."""
    scheduler, num_steps = llm.engine.scheduler, 0
    schedule, first_id = scheduler.schedule, llm.engine.stats().num_received

    def schedule_drafts() -> SchedulerOutput:
        nonlocal num_steps
        num_steps += 1
        for request in list(scheduler._running.values()):
            tokens = expected[request.request_id - first_id][0]
            scheduler.set_drafts(request.request_id, guess(tokens, request.num_output_tokens))
        return schedule()

    scheduler.schedule = schedule_drafts  # type: ignore[method-assign]
    try:
        return run(llm, params), num_steps
    finally:
        scheduler.schedule = schedule  # type: ignore[method-assign]
        scheduler.check()


def right(tokens: list[int], num_done: int) -> list[int]:
    return tokens[num_done : num_done + 3]


def wrong(tokens: list[int], num_done: int) -> list[int]:
    return [(token_id + 1) % 384 for token_id in right(tokens, num_done)]


def partly_right(tokens: list[int], num_done: int) -> list[int]:
    drafts = right(tokens, num_done)
    drafts[num_done % 3 : num_done % 3 + 1] = [77]
    return drafts


def test_drafts_change_no_bit(tmp_path: Path) -> None:
    llm = load(tmp_path, "CPU")
    many = [SamplingParams(**one, max_tokens=NUM_TOKENS, ignore_eos=True) for one in PARAMS]
    plain = [SamplingParams(**one, max_tokens=NUM_TOKENS, ignore_eos=True) for one in 3 * PARAMS[:2]]
    for params in (many, plain):  # the latter draw in the replay
        expected, num_steps = run_with_drafts(llm, params, run(llm, params), lambda tokens, num_done: [])
        for guess in (right, wrong, partly_right):
            results, num_with_drafts = run_with_drafts(llm, params, expected, guess)
            assert results == expected
            if guess is not wrong:
                assert num_with_drafts < num_steps


def test_drafts_change_no_token_on_the_reference_device(tmp_path: Path) -> None:
    """Nor a bit, but for what torch's products owe to the batch."""
    llm = load(tmp_path, "REFERENCE")
    params = [SamplingParams(**one, max_tokens=8, ignore_eos=True) for one in PARAMS]
    expected = run(llm, params)
    results, _ = run_with_drafts(llm, params, expected, partly_right)
    assert [tokens for tokens, _ in results] == [tokens for tokens, _ in expected]


def load(folder: Path, device: str) -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 40, "num_threads": 1}
    return LLM(str(make_folder(folder)), use_tqdm=False, attention_backend=device, **sizes)

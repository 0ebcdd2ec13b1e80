"""Thousands of requests on real weights, in a pool that is always short, a tenth of them aborted: answers are those of
requests that were alone, blocks come back, memory stays flat."""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from octavo import LLM, SamplingParams
from octavo.ipc.messages import AddRequest
from tests.smollm2 import gguf_path

NUM_REQUESTS, NUM_KINDS, NUM_OPEN = 3_000, 60, 40
BLOCK_BYTES = 16 * 23_040
"""Sixteen tokens of 30 layers, three heads of 64 in bfloat16, K and V."""
SHARED = [100 + 37 * i % 4_000 for i in range(40)]


@dataclass(frozen=True)
class Kind:
    """One of the prompts that come again and again, with how it is answered."""

    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass
class Answer:
    kind: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


def make_kinds(rng: random.Random) -> list[Kind]:
    kinds = []
    for index in range(NUM_KINDS):
        prefix = SHARED[: rng.randint(1, len(SHARED))] if index % 3 == 0 else []
        prompt = prefix + [rng.randint(100, 40_000) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]), seed=index, max_tokens=rng.randint(1, 32), ignore_eos=True, logprobs=0
        )
        kinds.append(Kind(prompt, params))
    return kinds


def run(llm: LLM, kinds: list[Kind], order: list[int], num_open: int, abort_share: float) -> dict[int, Answer]:
    """Keep so many requests open until all of `order` were served, or aborted at random."""
    engine, rng = llm.engine, random.Random(1)
    answers: dict[int, Answer] = {}
    open_ids: set[int] = set()
    waiting = list(enumerate(order))[::-1]
    rss: list[int] = []
    while waiting or open_ids:
        while waiting and len(open_ids) < num_open:
            request_id, kind = waiting.pop()
            one = kinds[kind]
            engine.add_request(
                AddRequest(request_id=request_id, prompt_token_ids=one.prompt_token_ids, sampling_params=one.params)
            )
            answers[request_id] = Answer(kind)
            open_ids.add(request_id)
            if len(answers) % (NUM_REQUESTS // 3) == 0:
                rss.append(psutil.Process().memory_info().rss)
        if rng.random() < abort_share:
            request_id = rng.choice(sorted(open_ids))
            engine.abort(request_id)
            answers[request_id].finish_reason = "abort"
            open_ids.discard(request_id)
        for delta in engine.step():
            answer = answers[delta.request_id]
            answer.token_ids += delta.new_token_ids
            answer.logprobs += [one.logprob for one in delta.logprobs or []]
            if delta.finish_reason is not None:
                answer.finish_reason = delta.finish_reason
                open_ids.discard(delta.request_id)
        if rng.random() < 0.05:
            engine.scheduler.check()
    if rss:
        assert rss[-1] < rss[0] * 1.05, [f"{size >> 20} MiB" for size in rss]
    return answers


def load(**options: Any) -> LLM:
    return LLM(gguf_path(), use_tqdm=False, max_model_len=512, **options)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_thousand_requests_in_a_pool_that_is_short() -> None:
    kinds = make_kinds(random.Random(0))
    alone = run(load(enable_prefix_caching=False), kinds, list(range(NUM_KINDS)), num_open=1, abort_share=0.0)
    llm = load(
        kv_cache_memory_bytes=64 * BLOCK_BYTES,
        num_swap_blocks=64,
        max_num_seqs=32,
        admission_policy="greedy",
        async_scheduling=True,
    )
    order = random.Random(2).choices(range(NUM_KINDS), k=NUM_REQUESTS)
    answers = run(llm, kinds, order, num_open=NUM_OPEN, abort_share=0.08)
    ends: dict[str | None, int] = defaultdict(int)
    for answer in answers.values():
        ends[answer.finish_reason] += 1
        expected, count = alone[answer.kind], len(answer.token_ids)
        assert (answer.token_ids, answer.logprobs) == (expected.token_ids[:count], expected.logprobs[:count])
        assert answer.finish_reason == "abort" or count == len(expected.token_ids)
    assert set(ends) == {"length", "abort"}
    assert ends["abort"] > NUM_REQUESTS // 20
    llm.engine.scheduler.check()
    stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_used_blocks == 0

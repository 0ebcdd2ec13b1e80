"""DESIGN 9 on real weights: the native provider gives one request the same bits whatever else happens.

In the default format, the file's own blocks with eight-bit activations, where no other is named.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from tests.smollm2 import PROMPTS, gguf_path

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, logprobs=2)
SHORT = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2)
SEEDED = [SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=24, logprobs=0) for i in range(len(PROMPTS))]


def load(**options: Any) -> LLM:
    return LLM(gguf_path(), use_tqdm=False, **({"attention_backend": "CPU", "max_model_len": 512} | options))


def generate(llm: LLM, params: SamplingParams | Sequence[SamplingParams]) -> list[tuple[object, ...]]:
    return [bits(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def bits(request: RequestOutput) -> tuple[object, ...]:
    """Tokens and logprobs, whose floats compare equal only if every bit is."""
    (output,) = request.outputs
    return output.token_ids, output.logprobs, output.finish_reason


@pytest.fixture(scope="module")
def expected() -> list[tuple[object, ...]]:
    """Every prompt alone and cold."""
    llm = load(enable_prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=2048)
    return generate(llm, GREEDY)


@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, 2048])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_tokens_and_logprobs_do_not_depend_on_chunks_cache_or_company(
    expected: list[tuple[object, ...]], max_num_batched_tokens: int, enable_prefix_caching: bool
) -> None:
    llm = load(max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=enable_prefix_caching)
    assert generate(llm, GREEDY) == expected  # twenty at once, cold
    assert generate(llm, GREEDY) == expected  # and warm
    assert (llm.engine.stats().prefix_cache_hits > 0) == enable_prefix_caching


def test_tokens_and_logprobs_survive_preemption(expected: list[tuple[object, ...]]) -> None:
    llm = load(kv_cache_memory_bytes=24 * 16 * 23_040, admission_policy="greedy")  # 24 blocks for up to 20 x 4
    assert llm.info.config.scheduler.num_blocks == 24
    assert generate(llm, GREEDY) == expected
    assert llm.engine.stats().num_preemptions > 0


def test_seeded_sampling_does_not_depend_on_company_or_steps_in_flight() -> None:
    alone = generate(load(max_num_seqs=1), SEEDED)
    assert generate(load(max_num_batched_tokens=32), SEEDED) == alone
    assert generate(load(async_scheduling=True, block_size=32), SEEDED) == alone


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_number_of_threads_changes_nothing(expected: list[tuple[object, ...]], num_threads: int) -> None:
    assert generate(load(num_threads=num_threads), GREEDY) == expected


@pytest.mark.parametrize(
    "options",
    [{"quantization": "none"}, {"quantization": "int8"}, {"activation_dtype": "bfloat16"}],
    ids=["dequantised", "int8", "weight-only"],
)
def test_answers_in_other_formats_do_not_depend_on_chunks_or_company(options: dict[str, Any]) -> None:
    alone = generate(load(**options, max_num_seqs=1, max_num_batched_tokens=2048), SHORT)
    together = load(**options, max_num_batched_tokens=48)
    assert generate(together, SHORT) == alone
    assert generate(together, SHORT) == alone

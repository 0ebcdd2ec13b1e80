"""Sliding windows save blocks and change no bit of an answer, neither when blocks are short nor beyond the pool."""

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import ContextLengthError
from tests.tiny_models import make_folder

PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2)
PROMPTS = [[2 + (7 * i + 3 * r) % 380 for i in range(20 + 31 * r)] for r in range(6)]
BLOCK_BYTES = 16 * 2 * 2 * 4  # of a layer, for each of the head's dimensions: float32, two key-value heads


def load(folder: Path, num_blocks: int, block_bytes: int, **options: object) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        attention_backend="CPU",
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=num_blocks * block_bytes,
        use_tqdm=False,
        **options,
    )


def bits(outputs: list[RequestOutput]) -> list[object]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_answers_are_the_same_bits_whatever_the_pool_and_the_company(tmp_path: Path) -> None:
    """Gemma 3's groups: two of a layer with a window of 24, one of a layer without."""
    folder = make_folder(tmp_path, "gemma3")
    roomy = load(folder, 1000, 32 * BLOCK_BYTES, enable_prefix_caching=False, enforce_eager=True)
    alone = [bits(roomy.generate(prompt, PARAMS, use_tqdm=False))[0] for prompt in PROMPTS]
    tight = load(folder, 40, 32 * BLOCK_BYTES)
    for _ in range(2):  # cold, then with what the first round left in the cache
        assert bits(tight.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
    stats = tight.engine.stats()
    assert stats.num_preemptions > 0 or stats.num_evicted_blocks > 0
    assert stats.num_used_blocks == 0


def test_a_model_of_windows_alone_generates_beyond_its_pool(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "mistral")  # a window of 24 in all three layers
    small = load(folder, 6, 3 * 16 * BLOCK_BYTES)
    roomy = load(folder, 1000, 3 * 16 * BLOCK_BYTES)
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True, logprobs=2)
    assert bits(small.generate(PROMPTS[-1], params, use_tqdm=False)) == bits(
        roomy.generate(PROMPTS[-1], params, use_tqdm=False)
    )


@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [
        (9, {}),  # a step of one block
        (14, {"async_scheduling": False, "enable_prefix_caching": False}),
        (26, {"enforce_eager": True, "preemption_mode": "swap", "admission_policy": "greedy"}),
    ],
)
def test_a_sequence_longer_than_the_pool_gives_the_same_bits(
    tmp_path: Path, num_blocks: int, options: dict[str, Any]
) -> None:
    folder, prompts = make_folder(tmp_path, "gemma3"), [[2 + 11 * i % 380 for i in range(300)], *PROMPTS]
    roomy = load(folder, 1000, 32 * BLOCK_BYTES, enable_prefix_caching=False)
    expected = bits(roomy.generate(prompts, PARAMS, use_tqdm=False))
    small = load(folder, num_blocks, 32 * BLOCK_BYTES, num_swap_blocks=40, **options)
    for _ in range(2):  # cold and warm
        assert bits(small.generate(prompts, PARAMS, use_tqdm=False)) == expected
    stats = small.engine.stats()
    assert stats.num_blocks_swapped_out > 20
    assert stats.num_used_blocks == stats.num_used_swap_blocks == 0
    assert options.get("preemption_mode") != "swap" or stats.num_swap_preemptions > 0


def test_layers_without_a_window_still_bound_what_the_pool_holds(tmp_path: Path) -> None:
    small = load(make_folder(tmp_path, "gemma3"), 14, 32 * BLOCK_BYTES)
    with pytest.raises(ContextLengthError, match="The server's KV cache holds"):
        small.generate([2] * 200, PARAMS, use_tqdm=False)

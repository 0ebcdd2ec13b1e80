"""A KV cache under pressure never changes a bit of an answer: in small pools, in every preemption mode, with a tier and
without, cold and warm, wherever shared prefixes end, with a full disk, and for sequences longer than the pool."""

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ContextLengthError
from tests.smollm2 import PROMPTS, gguf_path
from tests.tiny_models import make_folder

BLOCK = 16
SHARED = [2 + 7 * i % 380 for i in range(6 * BLOCK)]
LENGTHS = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK]
TINY_PROMPTS = [[*SHARED[:length], 300 + length, 9] for length in LENGTHS]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
NEED = sum(-(-(len(prompt) + 40) // BLOCK) for prompt in TINY_PROMPTS)
LARGEST = -(-(len(TINY_PROMPTS[-1]) + 40) // BLOCK)

Bits = list[tuple[object, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("pressure"), "llama")


def load(model: str, num_blocks: int, block_bytes: int, **options: Any) -> LLM:
    """Admitting greedily, which preempts where predictions would not."""
    llm = LLM(
        model,
        attention_backend="CPU",
        use_tqdm=False,
        kv_cache_memory_bytes=num_blocks * block_bytes,
        admission_policy="greedy",
        **options,
    )
    assert llm.info.config.scheduler.num_blocks == num_blocks
    return llm


def load_tiny(folder: Path, num_blocks: int, **options: Any) -> LLM:
    defaults = {"max_num_batched_tokens": 64, "dtype": "bfloat16"}
    return load(str(folder), num_blocks, 6144, **(defaults | options))  # K and V of 3 layers, 2 heads, 16 x 16 bf16


def bits(llm: LLM, prompts: Sequence[Any], params: SamplingParams = PARAMS) -> Bits:
    return [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Bits:
    return bits(load_tiny(folder, NEED, max_num_seqs=1, enable_prefix_caching=False), TINY_PROMPTS)


@pytest.mark.parametrize("share", [1.0, 0.3, 0.1])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(("mode", "num_swap_blocks"), [("recompute", 0), ("recompute", 60), ("swap", 60), ("auto", 60)])
def test_no_pool_mode_or_tier_changes_a_bit(
    folder: Path, alone: Bits, share: float, enable_prefix_caching: bool, mode: str, num_swap_blocks: int
) -> None:
    num_blocks = int(NEED * share) if num_swap_blocks else max(int(NEED * share), LARGEST)
    llm = load_tiny(
        folder,
        num_blocks,
        num_swap_blocks=num_swap_blocks,
        preemption_mode=mode,
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=mode == "auto",
    )
    assert bits(llm, TINY_PROMPTS) == alone  # cold
    assert bits(llm, TINY_PROMPTS) == alone  # warm
    stats = llm.engine.stats()
    assert stats.num_used_blocks == stats.num_used_swap_blocks == 0
    if share == 1.0 or not num_swap_blocks:
        assert (stats.num_preemptions > 0) == (share < 1.0)
    elif share == 0.1:  # less than any request needs
        assert stats.num_blocks_swapped_out > 0
    elif mode == "swap":
        assert stats.num_swap_preemptions > 0
        assert stats.num_blocks_swapped_in > 0
    if mode == "recompute":
        assert stats.num_swap_preemptions == 0


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype", "block_bytes"), [("llama", "int8", 3840), ("qwen2-window", "bfloat16", 2048)]
)
def test_quantised_caches_and_tables_with_windows_are_swapped_bit_for_bit(
    tmp_path: Path, family: str, kv_cache_dtype: str, block_bytes: int
) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": 64}
    model = str(make_folder(tmp_path, family))
    expected = bits(load(model, 80, block_bytes, max_num_seqs=1, **options), TINY_PROMPTS)
    llm = load(
        model, 16 if family == "llama" else 22, block_bytes, num_swap_blocks=60, preemption_mode="swap", **options
    )
    assert bits(llm, TINY_PROMPTS) == expected
    assert llm.engine.stats().num_swap_preemptions > 0


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_sequence_longer_than_the_pool_gives_the_same_bits(
    folder: Path, enforce_eager: bool, async_scheduling: bool
) -> None:
    prompt, params = [SHARED * 2], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2)
    expected = bits(load_tiny(folder, 16), prompt, params)
    small = load_tiny(folder, 4, num_swap_blocks=12, enforce_eager=enforce_eager, async_scheduling=async_scheduling)
    assert bits(small, prompt, params) == expected
    assert small.engine.stats().num_blocks_swapped_out > 0


def test_without_a_tier_such_a_sequence_is_refused_with_the_numbers_and_the_option(folder: Path) -> None:
    with pytest.raises(ContextLengthError, match=r"holds 64 tokens.*room for 251.*--swap-space"):
        bits(load_tiny(folder, 4), [SHARED * 2], until(60))


def until(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_a_full_disk_costs_time_and_nothing_else(
    folder: Path, alone: Bits, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    llm = load_tiny(folder, NEED // 3, num_swap_blocks=600, preemption_mode="swap", kv_cache_dir=str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # the first of three layers fits
    try:
        answers = bits(llm, TINY_PROMPTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answers == bits(llm, TINY_PROMPTS) == alone
    assert llm.engine.scheduler.is_tier_closed
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(ContextLengthError):
        llm.generate([SHARED * 4], until(60), use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preemption_mode": "swap"}, "--swap-space"),
        ({"num_swap_blocks": 10, "kv_cache_dir": "/nowhere"}, "--kv-cache-dir"),
        ({"swap_space": 1e9}, "does not fit"),
        ({"num_swap_blocks": 10, "runner": "pooling"}, "--runner pooling"),
    ],
)
def test_a_tier_that_can_not_work_is_refused_at_the_start(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_tiny(folder, 8, **options)


def test_of_two_sizes_of_the_tier_the_smaller_wins(folder: Path) -> None:
    assert load_tiny(folder, 8, num_swap_blocks=10, swap_space=1.0).info.config.scheduler.num_swap_blocks == 10
    assert (
        load_tiny(folder, 8, num_swap_blocks=10, swap_space=6144 * 7 / 2**30).info.config.scheduler.num_swap_blocks == 7
    )


def test_smollm2_under_pressure_gives_the_same_bits() -> None:
    prompts, params = PROMPTS[:6], SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, ignore_eos=True)
    options: dict[str, Any] = {"max_model_len": 512, "block_bytes": 16 * 23_040}
    expected = bits(load(gguf_path(), 64, **options), prompts, params)
    llm = load(gguf_path(), 5, num_swap_blocks=64, preemption_mode="swap", **options)
    assert bits(llm, prompts, params) == expected  # cold
    assert bits(llm, prompts, params) == expected  # warm
    assert llm.engine.stats().num_swap_preemptions > 0
    assert llm.engine.stats().num_blocks_swapped_in > 0

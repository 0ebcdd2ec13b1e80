"""The prefix cache never changes a bit of an answer, wherever the shared prefix ends."""

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.tiny_models import make_folder

BLOCK = 16
LENGTHS = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=3)
SHARED = [2 + 7 * i % 380 for i in range(6 * BLOCK)]


@pytest.fixture(scope="module", params=[("llama", "bfloat16"), ("mistral", "float32"), ("gemma3", "float16")])
def folder_and_dtype(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    family, dtype = request.param
    return make_folder(tmp_path_factory.mktemp("prefix"), family), dtype


def load(folder_and_dtype: tuple[Path, str], enable_prefix_caching: bool) -> LLM:
    folder, dtype = folder_and_dtype
    return LLM(
        str(folder),
        dtype=dtype,
        attention_backend="CPU",
        enable_prefix_caching=enable_prefix_caching,
        kv_cache_memory_bytes=4 << 20,
        use_tqdm=False,
    )


def bits(llm: LLM, prompt: list[int]) -> tuple[object, ...]:
    (request,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    return request.outputs[0].token_ids, request.outputs[0].logprobs


def test_warm_equals_cold_wherever_the_shared_prefix_ends(folder_and_dtype: tuple[Path, str]) -> None:
    cold = load(folder_and_dtype, enable_prefix_caching=False)
    for length in LENGTHS:
        warm = load(folder_and_dtype, enable_prefix_caching=True)
        bits(warm, SHARED)
        for tail in ([], [371, 4, 9]):  # the whole prompt cached, and one that goes on differently
            prompt = SHARED[:length] + tail
            assert bits(warm, prompt) == bits(cold, prompt), (length, tail)
        assert warm.engine.stats().prefix_cache_hits == 2 * (length // BLOCK) * BLOCK - (
            BLOCK if length % BLOCK == 0 else 0
        )

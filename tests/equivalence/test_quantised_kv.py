"""A quantised KV cache keeps the promise: nothing around a request changes a bit of its answer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.devices.registry import open_device
from octavo.layers.weights import WeightFormat
from octavo.models.loader import load_model, open_checkpoint
from octavo.text.tokenizer import load_tokenizer
from tests.models.driver import sequence_logits
from tests.smollm2 import PROMPTS, gguf_path
from tests.tiny_models import make_folder

PROMPT = [2 + 37 * i % 380 for i in range(150)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
BLOCK_BYTES = 16 * 3 * 2 * 2 * (16 + 4)  # tokens, layers, keys and values, heads, elements and scale


@pytest.fixture(scope="module", params=[("llama", "int8"), ("mistral", "int8"), ("llama", "fp8")])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    family, kv_cache_dtype = request.param
    return make_folder(tmp_path_factory.mktemp("quantised-kv") / family, family), kv_cache_dtype


def load(model: tuple[Path, str], **options: Any) -> LLM:
    folder, kv_cache_dtype = model
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 200 * BLOCK_BYTES, "max_num_batched_tokens": 512} | options
    return LLM(
        str(folder),
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        attention_backend="CPU",
        use_tqdm=False,
        **settings,
    )


def bits(llm: LLM, *prompts: list[int]) -> list[tuple[object, ...]]:
    outputs = llm.generate(list(prompts), PARAMS, use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


@pytest.fixture(scope="module")
def alone(model: tuple[Path, str]) -> tuple[object, ...]:
    (one,) = bits(load(model, enable_prefix_caching=False, max_num_seqs=1), PROMPT)
    return one


def test_chunks_company_and_the_prefix_cache_change_nothing(model: tuple[Path, str], alone: tuple[object, ...]) -> None:
    for max_num_batched_tokens in (7, 64, 512):
        llm = load(model, max_num_batched_tokens=max_num_batched_tokens)
        assert bits(llm, PROMPT[:20], PROMPT, PROMPT[3:])[1] == alone  # cold
        assert bits(llm, PROMPT[:33], PROMPT)[1] == alone  # warm
        assert llm.engine.stats().prefix_cache_hits > 0


def test_preemption_changes_nothing(model: tuple[Path, str], alone: tuple[object, ...]) -> None:
    num_blocks = 8 if model[0].name == "mistral" else 12  # of which a window of 24 tokens leaves most free
    llm = load(
        model, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES, max_num_batched_tokens=16, admission_policy="greedy"
    )
    assert llm.info.config.scheduler.num_blocks == num_blocks
    others = [PROMPT[:60], PROMPT[9:80], PROMPT[:40], PROMPT[5:90], PROMPT[2:70]]
    assert bits(llm, *others[:3], PROMPT, *others[3:])[3] == alone
    assert llm.engine.stats().num_preemptions > 0


def test_block_size_and_threads_change_nothing(model: tuple[Path, str], alone: tuple[object, ...]) -> None:
    assert bits(load(model, block_size=32, num_threads=1), PROMPT) == [alone]
    assert bits(load(model, block_size=64, num_threads=2), PROMPT) == [alone]


def test_real_logits_stay_near_those_of_an_unquantised_cache() -> None:
    checkpoint, ops = open_checkpoint(gguf_path()), open_device("CPU").ops
    model = load_model(checkpoint, ops, WeightFormat(torch.bfloat16), 512)
    token_ids = load_tokenizer(checkpoint.path, checkpoint.vocabulary).encode(" ".join(PROMPTS))

    def log_probabilities(kv_cache_dtype: str) -> torch.Tensor:
        logits = sequence_logits(
            model, ops, checkpoint.config, token_ids, torch.bfloat16, kv_cache_dtype=kv_cache_dtype
        )
        return torch.log_softmax(logits.double(), dim=-1)

    exact = log_probabilities("bfloat16")
    for kv_cache_dtype, most in (("int8", 0.005), ("fp8", 0.02)):
        divergence = (exact.exp() * (exact - log_probabilities(kv_cache_dtype))).sum(dim=-1).mean()
        assert 0 < divergence < most, kv_cache_dtype

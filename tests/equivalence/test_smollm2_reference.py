"""SmolLM2's real weights against transformers on the same dequantised weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.devices.registry import open_device
from octavo.layers.weights import WeightFormat
from octavo.models.loader import load_model, open_checkpoint
from octavo.text.tokenizer import load_tokenizer
from tests.equivalence.test_beam_search import assert_equal
from tests.models.driver import sequence_logits
from tests.smollm2 import PROMPTS, gguf_path

CLOSE = 1e-4
"""Logits closer than this may fall either way."""


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' float32 model of the same file."""
    from transformers import AutoModelForCausalLM, GgufConfig

    path = Path(gguf_path())
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()


def _assert_greedy_equal(reference: Any, prompts: list[str], num_tokens: int) -> None:
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 20, "use_tqdm": False}
    llm = LLM(gguf_path(), dtype="float32", quantization="none", attention_backend="REFERENCE", **options)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for request in llm.generate(prompts, params, use_tqdm=False):
        tokens = request.prompt_token_ids + request.outputs[0].token_ids
        # Teacher-forced: what transformers would choose after each prefix, in one pass.
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens])).logits[0, len(request.prompt_token_ids) - 1 : -1]
        best = logits.topk(2, dim=-1).values
        exempt = best[:, 0] - best[:, 1] < CLOSE
        equal = logits.argmax(dim=-1) == torch.tensor(request.outputs[0].token_ids)
        assert (equal | exempt).all(), f"{request.prompt!r} differs at {(~(equal | exempt)).nonzero().tolist()}"
        assert exempt.sum() <= 2


def test_greedy_tokens_equal_transformers(reference: Any) -> None:
    _assert_greedy_equal(reference, PROMPTS[:4], 24)


@pytest.mark.parametrize("backend", ["CPU", pytest.param("REFERENCE", marks=pytest.mark.slow)])
def test_beams_equal_transformers(reference: Any, backend: str) -> None:
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "use_tqdm": False}
    llm = LLM(gguf_path(), dtype="float32", quantization="none", attention_backend=backend, **options)
    for prompt, width in zip(PROMPTS, (2, 4), strict=False):
        params = BeamSearchParams(beam_width=width, max_tokens=8)
        assert_equal(llm, reference, llm.tokenizer.encode(prompt), params, sorted(llm.info.eos_token_ids))


@pytest.mark.slow
def test_greedy_tokens_of_twenty_prompts_equal_transformers(reference: Any) -> None:
    _assert_greedy_equal(reference, PROMPTS, 64)


def test_native_bfloat16_logits_are_near_transformers_float32(reference: Any) -> None:
    checkpoint, ops = open_checkpoint(gguf_path()), open_device("CPU").ops
    model = load_model(checkpoint, ops, WeightFormat(torch.bfloat16), 512)
    token_ids = load_tokenizer(checkpoint.path, checkpoint.vocabulary).encode(" ".join(PROMPTS))
    actual = sequence_logits(model, ops, checkpoint.config, token_ids, torch.bfloat16).double()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0].double()
    relative_error = (actual - expected).norm() / expected.norm()
    log_p, log_q = torch.log_softmax(expected, dim=-1), torch.log_softmax(actual, dim=-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()
    print(f"relative error {relative_error:.2e}, mean KL {divergence:.2e} over {len(token_ids)} positions")
    assert relative_error < 2e-2
    assert divergence < 1e-3


def test_perplexity_of_each_format_is_near_that_of_bfloat16() -> None:
    checkpoint, ops = open_checkpoint(gguf_path()), open_device("CPU").ops
    text = (Path(__file__).parents[2] / "docs/ARCHITECTURE.md").read_text()
    token_ids = load_tokenizer(checkpoint.path, checkpoint.vocabulary).encode(text)[:1500]
    perplexities = []
    for quantization in ("none", "int8", "gguf", "int4"):
        model = load_model(checkpoint, ops, WeightFormat(torch.bfloat16, quantization), 2048)
        logits = sequence_logits(model, ops, checkpoint.config, token_ids, torch.bfloat16, chunk=256)
        losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:]))
        perplexities.append(float(losses.exp()))
    bfloat16, int8, gguf, int4 = perplexities
    print(f"perplexity: bfloat16 {bfloat16:.2f}, int8 {int8:.2f}, the file's blocks {gguf:.2f}, int4 {int4:.2f}")
    assert int8 < 1.01 * bfloat16
    assert gguf < 1.01 * bfloat16
    assert int4 < 1.25 * bfloat16

"""Beam search against transformers' generate, in float32: the same tokens, and scores as near as float32 sums are."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, SamplingParams
from tests.tiny_models import make_folder, make_model

MAX_TOKENS, PAD = 14, 7
END_TOKENS = tuple(range(20, 50))
"""So many that beams of random models end now and then."""
OPTIONS: list[dict[str, Any]] = [
    {"beam_width": 2},
    {"beam_width": 5, "early_stopping": True},
    {"beam_width": 4, "length_penalty": -1.0},
    {"beam_width": 3, "length_penalty": 0.0, "early_stopping": "never"},
    {"beam_width": 4, "length_penalty": 2.0, "early_stopping": "never"},
]


def _expected(
    reference: Any, prompt: list[int], params: BeamSearchParams, eos: list[int]
) -> tuple[list[list[int]], list[float]]:
    with torch.inference_mode():
        output = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=params.max_tokens,
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=eos,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
        )
    return output.sequences.tolist(), output.sequences_scores.tolist()


def assert_equal(
    llm: LLM, reference: Any, prompt: list[int], params: BeamSearchParams, eos: list[int]
) -> list[str | None]:
    (output,) = llm.beam_search(prompt, params, use_tqdm=False)
    sequences, scores = _expected(reference, prompt, params, eos)
    padded = [beam.tokens + [PAD] * (len(sequences[0]) - len(beam.tokens)) for beam in output.sequences]
    assert padded == sequences
    assert [beam.score for beam in output.sequences] == pytest.approx(scores, rel=1e-5, abs=1e-5)
    for beam in output.sequences:
        num_tokens = len(beam.logprobs)
        assert beam.score == pytest.approx(beam.cum_logprob / num_tokens**params.length_penalty)
    return [beam.finish_reason for beam in output.sequences]


@pytest.mark.parametrize("backend", ["REFERENCE", "CPU"])
def test_tiny_models_equal_transformers(backend: str, tmp_path: Path) -> None:
    reference = make_model("llama")
    llm = LLM(str(make_folder(tmp_path)), dtype="float32", attention_backend=backend, max_num_seqs=8, use_tqdm=False)
    reasons = set()
    for seed, options in enumerate(OPTIONS):
        prompt = torch.randint(50, 384, (14 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        params = BeamSearchParams(max_tokens=MAX_TOKENS, stop_token_ids=END_TOKENS, **options)
        reasons.update(assert_equal(llm, reference, prompt, params, [1, *END_TOKENS]))
    assert reasons == {"stop", "length"}


def test_beams_do_not_depend_on_company_nor_on_a_short_pool(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path))
    params = BeamSearchParams(beam_width=4, max_tokens=40).sampling_params()
    prompts = [[60 + i, *range(70, 85 + i)] for i in range(3)]

    def results(llm: LLM, prompts: list[list[int]], num_others: int) -> list[Any]:
        others = SamplingParams(n=2, seed=1, max_tokens=50, ignore_eos=True)
        company = [[100 + i] * 20 for i in range(num_others)]
        outputs = llm.generate([*prompts, *company], [params] * len(prompts) + [others] * num_others, use_tqdm=False)
        return [[(o.token_ids, o.score, o.logprobs) for o in request.outputs] for request in outputs[: len(prompts)]]

    roomy = LLM(folder, max_num_seqs=8, max_model_len=128, use_tqdm=False)
    alone = [results(roomy, [prompt], 0)[0] for prompt in prompts]
    assert results(roomy, prompts, 4) == alone
    num_bytes = 9 * 16 * 3 * 2 * 2 * 16 * 4  # of nine blocks: a search alone needs up to sixteen
    tight = LLM(folder, max_num_seqs=8, max_model_len=128, kv_cache_memory_bytes=num_bytes, use_tqdm=False)
    assert tight.info.config.scheduler.num_blocks == 9
    assert results(tight, prompts, 4) == alone
    assert tight.engine.stats().num_preemptions

"""LLM.embed on tiny models: pooling as the files say, and decoders over the paged cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, ConfigError, InvalidRequestError, RequestFailedError
from octavo.llm import Prompt
from tests.tiny_encoders import make_encoder, make_encoder_folder, reference_hidden_states, write_modules
from tests.tiny_models import make_folder, make_model

PROMPTS: list[Prompt] = [list(range(5, 5 + n)) for n in (1, 40, 7, 100, 16)]


def embed(llm: LLM, prompts: list[Prompt], **options: Any) -> torch.Tensor:
    return torch.tensor([output.embedding for output in llm.embed(prompts, use_tqdm=False, **options)])


@pytest.mark.parametrize(
    ("pooling", "normalize"), [("mean", True), ("mean", False), ("cls", False), ("lasttoken", True)]
)
def test_texts_are_pooled_as_the_files_say(pooling: str, normalize: bool, tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path, pooling=None)
    write_modules(folder, pooling, normalize)
    llm = LLM(str(folder), use_tqdm=False)
    for prompt, vector in zip(PROMPTS, embed(llm, PROMPTS), strict=True):
        assert not isinstance(prompt, (str, dict))
        states = reference_hidden_states(make_encoder(), list(prompt))
        expected = {"mean": states.mean(dim=0), "cls": states[0], "lasttoken": states[-1]}[pooling]
        expected = torch.nn.functional.normalize(expected, dim=0) if normalize else expected
        assert (vector - expected).abs().max() < 1e-4


def test_without_files_an_encoder_takes_the_mean_and_normalises(tmp_path: Path) -> None:
    without = embed(LLM(str(make_encoder_folder(tmp_path / "a", pooling=None)), use_tqdm=False), PROMPTS)
    assert torch.equal(without, embed(LLM(str(make_encoder_folder(tmp_path / "b")), use_tqdm=False), PROMPTS))


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("decoder") / "tiny", "qwen2")


def pooling_decoder(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), use_tqdm=False, runner="pooling", max_num_seqs=4, **options)


def test_a_decoder_embeds_its_last_token_after_the_last_norm(decoder_folder: Path) -> None:
    reference = make_model("qwen2").base_model
    vectors = embed(pooling_decoder(decoder_folder), PROMPTS)
    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        assert not isinstance(prompt, (str, dict))
        expected = torch.nn.functional.normalize(reference_hidden_states(reference, list(prompt))[-1], dim=0)
        assert (vector - expected).abs().max() < 1e-4


def test_chunks_the_prefix_cache_and_steps_in_flight_change_no_bit(decoder_folder: Path) -> None:
    whole = embed(pooling_decoder(decoder_folder), PROMPTS)
    chunked = pooling_decoder(decoder_folder, max_num_batched_tokens=8, async_scheduling=True)
    assert torch.equal(embed(chunked, PROMPTS), whole)
    again = chunked.embed(PROMPTS, use_tqdm=False)
    assert [output.num_cached_tokens for output in again] == [0, 32, 0, 96, 0]
    assert torch.equal(torch.tensor([output.embedding for output in again]), whole)
    assert chunked.engine.stats().num_used_blocks == 0


def test_a_decoder_saved_without_its_head_loads(decoder_folder: Path, tmp_path: Path) -> None:
    """As embedding models are: no lm_head, and names that begin with the layers."""
    reference = make_model("llama")
    folder = make_folder(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    reference.base_model.save_pretrained(folder)
    write_modules(folder, "lasttoken")
    vectors = embed(LLM(str(folder), use_tqdm=False), PROMPTS)  # the files say that it embeds
    expected = torch.nn.functional.normalize(reference_hidden_states(reference.base_model, [5, 6, 7]), dim=-1)[-1]
    assert (embed(LLM(str(folder), use_tqdm=False), [[5, 6, 7]])[0] - expected).abs().max() < 1e-4
    assert vectors.norm(dim=1).sub(1).abs().max() < 1e-6


def test_matryoshka_embeddings_are_cut_and_have_length_one_again(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [16, 64]}))
    llm = LLM(str(folder), use_tqdm=False)
    whole, cut = embed(llm, PROMPTS), embed(llm, PROMPTS, dimensions=16)
    assert cut.shape == (len(PROMPTS), 16)
    assert torch.allclose(cut, torch.nn.functional.normalize(whole[:, :16]))
    assert torch.equal(embed(llm, PROMPTS, dimensions=64), whole)
    with pytest.raises(InvalidRequestError, match="dimensions must be one of 16, 64, got 17"):
        embed(llm, PROMPTS, dimensions=17)


def test_a_model_that_generates_does_not_embed(decoder_folder: Path) -> None:
    llm = LLM(str(decoder_folder), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="--runner pooling"):
        llm.embed("the fox", use_tqdm=False)


def test_a_decoder_whose_files_ask_for_the_mean_says_what_to_do(decoder_folder: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "llama")
    write_modules(folder, "mean")
    with pytest.raises(ConfigError, match="--runner generate"):
        LLM(str(folder), use_tqdm=False)
    assert LLM(str(folder), use_tqdm=False, runner="generate").generate("the fox", use_tqdm=False)


def test_a_nan_fails_its_own_text_only(tmp_path: Path) -> None:
    llm = LLM(str(make_encoder_folder(tmp_path)), use_tqdm=False, enforce_eager=True)
    runner = llm.engine.executor._runner.forward.model  # type: ignore[attr-defined]
    model = runner.model
    expected = embed(llm, PROMPTS)

    def poisoned(input_ids: torch.Tensor, ctx: object) -> torch.Tensor:
        states: torch.Tensor = model(input_ids, ctx)
        states[input_ids == 150] = float("nan")
        return states

    runner.model = poisoned
    with pytest.raises(RequestFailedError, match="The embedding is not finite"):
        embed(llm, [*PROMPTS, [150, 6]])
    assert torch.equal(embed(llm, PROMPTS), expected)
    llm.engine.scheduler.check()

"""all-MiniLM-L6-v2 itself against transformers with mean pooling and normalisation, which is sentence-transformers'."""

from pathlib import Path

import pytest
import torch
from transformers import BertModel

from octavo import LLM, ContextLengthError, InvalidRequestError
from tests.tiny_encoders import TEXTS, minilm_path, reference_hidden_states

LINES = [
    line for line in Path(__file__).parents[2].joinpath("docs", "ARCHITECTURE.md").read_text().splitlines() if line
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(minilm_path()), use_tqdm=False, num_threads=2)


def embed(llm: LLM, texts: list[str]) -> torch.Tensor:
    return torch.tensor([output.embedding for output in llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)])


@pytest.fixture(scope="module")
def expected(llm: LLM) -> torch.Tensor:
    """Of TEXTS and LINES."""
    model = BertModel.from_pretrained(minilm_path()).eval()
    token_ids = [llm.tokenizer.encode(text, max_tokens=256) for text in [*TEXTS, *LINES]]
    means = [reference_hidden_states(model, ids).mean(dim=0) for ids in token_ids]
    return torch.nn.functional.normalize(torch.stack(means))


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.999999), ("bfloat16", 0.9999)])
def test_embeddings_are_those_of_sentence_transformers(dtype: str, least: float, expected: torch.Tensor) -> None:
    llm = LLM(str(minilm_path()), use_tqdm=False, num_threads=2, dtype=dtype)
    cosines = torch.nn.functional.cosine_similarity(embed(llm, [*TEXTS, *LINES]), expected)
    assert cosines.min() > least


def test_a_text_among_others_gives_the_bits_it_gives_alone(llm: LLM) -> None:
    texts = [*TEXTS, *LINES]
    alone = torch.cat([embed(llm, [text]) for text in texts])
    assert torch.equal(embed(llm, texts), alone)
    assert torch.equal(embed(llm, texts[::-1]), alone.flip(0))


def test_nothing_is_left_behind_and_every_text_is_counted(llm: LLM) -> None:
    before = llm.engine.stats()
    outputs = llm.embed(TEXTS, use_tqdm=False)
    after = llm.engine.stats()
    llm.engine.scheduler.check()
    assert after.num_finished["stop"] - before.num_finished["stop"] == len(TEXTS)
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    assert after.num_prompt_tokens - before.num_prompt_tokens == num_tokens
    assert after.num_generation_tokens == 0


def test_what_can_not_be_embedded_is_refused_before_anything_runs(llm: LLM) -> None:
    received = llm.engine.stats().num_received
    with pytest.raises(ContextLengthError, match=r"256 tokens\. The input has 302 tokens.*truncate_prompt") as error:
        llm.embed(["fine", "hello " * 300], use_tqdm=False)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(InvalidRequestError, match="Token id 30522 in the input is outside"):
        llm.embed([[5, 30_522]], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="dimensions must be 384 or left out, got 100"):
        llm.embed("fine", dimensions=100, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"truncate_prompt_tokens must be -1 or from 1 to 256.*got 0"):
        llm.embed("fine", truncate_prompt_tokens=0, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="does not generate"):
        llm.generate("fine", use_tqdm=False)
    assert llm.engine.stats().num_received == received

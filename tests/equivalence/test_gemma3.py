"""Real Gemma 3 270M, in Q4_K_M, against transformers, and its 262,144 tokens against sentencepiece."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from sentencepiece import sentencepiece_model_pb2
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.checkpoint.checkpoint import Checkpoint, Vocabulary
from octavo.devices.registry import open_device
from octavo.layers.weights import WeightFormat
from octavo.models.loader import load_model
from octavo.text.gguf_pipeline import SPACE, TokenType
from octavo.text.tokenizer import load_tokenizer
from tests.checkpoint.opening import open_gguf
from tests.gemma3 import assemble
from tests.models.driver import sequence_logits
from tests.smollm2 import PROMPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "ARCHITECTURE.md"
SPACES_AND_SIGNS = [
    "  two  spaces   three",
    "tabs\tand\n\nlines\n\n\n\nmore\n",
    " " * 40 + "x",
    "x = [1, 2]\n    if y:\n        return 0\n",
    "日本語のテキスト, Ünïcödé, \N{LATIN SMALL LIGATURE FI}",
    "\N{GRINNING FACE}\N{THUMBS UP SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}",
    "<html><b>bold</b></html>",
    "1234567890 3.14 a\x00b\x01",
    "",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assemble(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def checkpoint(path: Path) -> Checkpoint:
    return open_gguf(path)


@pytest.fixture(scope="module")
def transformers_model(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def sentencepiece_of(vocabulary: Vocabulary) -> Any:
    model = sentencepiece_model_pb2.ModelProto()
    pieces = zip(vocabulary.tokens, vocabulary.scores, vocabulary.token_types.tolist(), strict=True)
    for index, (text, score, kind) in enumerate(pieces):
        spelled = text.replace(" ", SPACE) if kind == TokenType.USER_DEFINED else text  # as the converter found it
        kind = TokenType.UNKNOWN if index == vocabulary.unk_token_id else kind
        model.pieces.add(piece=spelled, score=float(score), type=int(kind))
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    ids = {"unk": vocabulary.unk_token_id, "bos": vocabulary.bos_token_id, "eos": vocabulary.eos_token_id}
    for name, token_id in ids.items():
        setattr(model.trainer_spec, f"{name}_id", token_id)
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def test_text_is_encoded_as_sentencepiece_does_and_soon(checkpoint: Checkpoint) -> None:
    assert checkpoint.vocabulary is not None
    start = time.process_time()
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.vocabulary)
    assert time.process_time() - start < 6
    reference = sentencepiece_of(checkpoint.vocabulary)
    for text in [DOCUMENT.read_text(), *PROMPTS, *SPACES_AND_SIGNS]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert token_ids == reference.encode(text), text[:80]
        assert tokenizer.decode(token_ids) == text
    assert tokenizer.encode("Hello")[0] == tokenizer.bos_token_id == 2


def test_logits_equal_transformers_beyond_the_window(checkpoint: Checkpoint, transformers_model: Any) -> None:
    ops = open_device("CPU").ops
    token_ids = load_tokenizer(checkpoint.path, checkpoint.vocabulary).encode(DOCUMENT.read_text())[:700]
    actual = sequence_logits(
        load_model(checkpoint, ops, WeightFormat(torch.float32), 1024), ops, checkpoint.config, token_ids
    )
    with torch.inference_mode():
        expected = transformers_model(torch.tensor([token_ids])).logits[0]
    assert (actual - expected).abs().max() < 1e-3  # logits reach 40
    assert torch.equal(actual.argmax(dim=-1), expected.argmax(dim=-1))


def greedy(model: Any, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    prompt = torch.tensor([token_ids])
    with torch.inference_mode():
        output = model.generate(prompt, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    return output[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


def test_greedy_tokens_equal_transformers(path: Path, transformers_model: Any) -> None:
    llm = LLM(str(path), dtype="float32", quantization="none", max_model_len=1024, max_num_seqs=8, use_tqdm=False)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for request in llm.generate(PROMPTS[:8], params, use_tqdm=False):
        assert request.outputs[0].token_ids == greedy(transformers_model, request.prompt_token_ids, 24)

"""Rows of an embedding that no token's text belongs to are left out: they can't be sampled, nor asked for."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from octavo import LLM, InvalidRequestError, SamplingParams
from octavo.devices.registry import open_device
from octavo.layers.weights import WeightFormat
from octavo.models.loader import load_model, open_checkpoint
from tests.checkpoint.gguf_files import TOKEN_TYPES, TOKENS, write_gguf
from tests.models.driver import sequence_logits
from tests.tiny_models import make_folder


def cut_tokenizer(folder: Path) -> int:
    """Take the tokens that fill the vocabulary up out of tokenizer.json; returns how many are left."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if "filler" not in token["content"]]
    path.write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return max(*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])) + 1


@pytest.mark.parametrize("family", ["llama", "llama-tied-mha", "gemma3"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_logits_are_of_tokens_alone_and_the_same_bits(family: str, quantization: str, tmp_path: Path) -> None:
    ops, folder = open_device("CPU").ops, make_folder(tmp_path, family)

    def logits() -> torch.Tensor:
        checkpoint = open_checkpoint(str(folder))
        model = load_model(checkpoint, ops, WeightFormat(torch.float32, quantization), 64)
        result = sequence_logits(model, ops, checkpoint.config, list(range(5, 45)))
        assert result.shape[1] == checkpoint.config.vocab_size
        return result

    whole = logits()
    num_tokens = cut_tokenizer(folder)
    assert num_tokens < whole.shape[1] == 384
    assert torch.equal(logits(), whole[:, :num_tokens])


def test_padding_is_neither_sampled_nor_taken(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "llama")
    num_tokens = cut_tokenizer(folder)
    llm = LLM(str(folder), use_tqdm=False, max_model_len=512)
    params = SamplingParams(temperature=50.0, max_tokens=400, ignore_eos=True, seed=1)
    (output,) = llm.generate([[5, 6, 7]], params)
    assert max(output.outputs[0].token_ids) < num_tokens
    with pytest.raises(InvalidRequestError, match=f"ids go from 0 to {num_tokens - 1}"):
        llm.generate([[num_tokens]], params)


def test_unused_tokens_at_a_gguf_vocabularys_end_are_padding(tmp_path: Path) -> None:
    """As converters write them: [PAD12] and so on, as many as the embedding has rows."""
    types = [*TOKEN_TYPES[:5], 5, *TOKEN_TYPES[6:10], 5, 5]
    path = write_gguf(
        tmp_path / "m.gguf",
        keys={
            "tokenizer.ggml.tokens": [*TOKENS[:10], "[PAD10]", "[PAD11]"],
            "tokenizer.ggml.token_type": types,
        },
        matrix_type=gguf.GGMLQuantizationType.Q8_0,
    )
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.config.vocab_size, checkpoint.config.num_padding_tokens) == (10, 2)
    model = load_model(checkpoint, open_device("CPU").ops, WeightFormat(torch.float32, "gguf"), 64)
    assert sequence_logits(model, open_device("CPU").ops, checkpoint.config, [3, 4, 5]).shape == (3, 10)
    assert np.prod(checkpoint.tensors["lm_head.weight"].shape) == 12 * checkpoint.config.hidden_size

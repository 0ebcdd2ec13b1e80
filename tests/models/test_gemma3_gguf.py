"""A Gemma 3 model means the same in a GGUF file as in a Hugging Face folder: names, norms' weights, windows, scales."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from octavo.checkpoint.gguf_names import MODEL_NAMES
from octavo.devices.registry import open_device
from octavo.layers.weights import WeightFormat
from octavo.models.gemma3_text import GGUF_LAYER_NAMES, Args
from octavo.models.loader import load_model
from tests.checkpoint.gguf_files import TOKEN_TYPES, TOKENS, VOCAB, write_gguf
from tests.checkpoint.opening import open_gguf
from tests.models.driver import sequence_logits
from tests.tiny_models import make_model

LAYER_TYPES = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]


def write_gemma(path: Path, model: PreTrainedModel) -> Path:
    """The model as llama.cpp's converter writes it: norms' weights are stored with 1 added."""
    config = model.config
    names = dict(MODEL_NAMES)
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{old}": f"model.layers.{layer}.{new}" for old, new in GGUF_LAYER_NAMES.items()}
    weights = dict(model.named_parameters())
    tensors = {
        old: weights[new].detach().numpy() + np.float32("norm" in new) for old, new in names.items() if new in weights
    }
    keys = {
        "gemma3.block_count": config.num_hidden_layers,
        "gemma3.context_length": config.max_position_embeddings,
        "gemma3.embedding_length": config.hidden_size,
        "gemma3.feed_forward_length": config.intermediate_size,
        "gemma3.attention.head_count": config.num_attention_heads,
        "gemma3.attention.head_count_kv": config.num_key_value_heads,
        "gemma3.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "gemma3.attention.key_length": config.head_dim,
        "gemma3.attention.value_length": config.head_dim,
        "gemma3.attention.sliding_window": config.sliding_window,
        "gemma3.rope.freq_base": 50_000.0,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "tokenizer.ggml.tokens": TOKENS + [f"token {i}" for i in range(VOCAB, config.vocab_size)],
        "tokenizer.ggml.token_type": TOKEN_TYPES + [1] * (config.vocab_size - VOCAB),
        "tokenizer.ggml.scores": [float(-i) for i in range(config.vocab_size)],
    }
    return write_gguf(path, "gemma3", keys, tensors)


@pytest.mark.parametrize("num_layers", [7, 62])
def test_logits_equal_transformers(tmp_path: Path, num_layers: int) -> None:
    types = (LAYER_TYPES[:6] * 11)[:num_layers]
    sizes = {"num_hidden_layers": num_layers, "hidden_size": 32, "num_attention_heads": 4, "layer_types": types}
    scalar = 32 // 4 if num_layers == 62 else 32  # the largest model scales by hidden_size / num_heads
    model = make_model("gemma3-linear-rope", **sizes, query_pre_attn_scalar=scalar)
    checkpoint = open_gguf(write_gemma(tmp_path / "model.gguf", model))
    ops = open_device("CPU").ops
    token_ids = torch.randint(2, 384, (60,), generator=torch.Generator().manual_seed(4)).tolist()
    actual = sequence_logits(
        load_model(checkpoint, ops, WeightFormat(torch.float32), 512), ops, checkpoint.config, token_ids
    )
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    assert (actual - expected).abs().max() < 2e-4


def test_the_context_is_the_files_whatever_the_scaling(tmp_path: Path) -> None:
    model = make_model("gemma3-linear-rope", num_hidden_layers=7, layer_types=LAYER_TYPES)
    config = open_gguf(write_gemma(tmp_path / "model.gguf", model)).config
    assert (config.rope.rope_type, config.rope.factor, config.rope.rope_theta) == ("linear", 8.0, 50_000.0)
    assert isinstance(config, Args)
    assert config.local_rope is not None
    assert (config.local_rope.rope_type, config.local_rope.rope_theta) == ("default", 10_000.0)
    assert [group.window for group in config.kv_groups] == [24] * 6 + [0]

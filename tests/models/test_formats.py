"""A model of quantised blocks of every type, against the same model with its weights dequantised to float32."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.checkpoint.model_config import TensorInfo
from octavo.devices.registry import open_device
from octavo.errors import CheckpointError
from octavo.layers.gguf_blocks import QUANTIZED_TYPES
from octavo.layers.weights import WeightFormat
from octavo.models.llama import Args
from octavo.models.loader import load_model
from tests.layers.block_bytes import BLOCK_BYTES, finite_blocks
from tests.models.driver import sequence_logits

CONFIG = Args(
    model_type="llama",
    vocab_size=300,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
MATRICES = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (512, 256),
    "mlp.up_proj": (512, 256),
    "mlp.down_proj": (256, 512),
}


class MemoryCheckpoint:
    """A decoder with random weights, its matrices in turn of these types; stacked ones mix them."""

    path, vocabulary, config = Path("memory"), None, CONFIG

    def __init__(self, types: list[str]) -> None:
        self.tensors: Mapping[str, TensorInfo]
        self._data: dict[str, npt.NDArray[np.uint8]] = {}
        tensors: dict[str, TensorInfo] = {}
        kinds = cycle(types)

        def add(name: str, shape: tuple[int, ...], dtype: str) -> None:
            rng, seed = np.random.default_rng(len(tensors)), len(tensors)
            if dtype in QUANTIZED_TYPES:
                block_size, block_bytes = BLOCK_BYTES[dtype]
                # So that weights are of a size that keeps activations moderate.
                size = 0.05 / math.sqrt(2 ** (8 * block_bytes / block_size))
                data = finite_blocks(dtype, (shape[0], shape[1]), seed, size).reshape(-1)
            elif dtype == "F16":
                data = (rng.standard_normal(shape) * 0.05).astype(np.float16).view(np.uint8).reshape(-1)
            else:
                data = (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32).view(np.uint8).reshape(-1)
            heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
            tensors[name] = TensorInfo(
                name=name, shape=shape, dtype=dtype, path=self.path, offset=0, num_bytes=data.size,
                rope_interleaved_heads=heads,
            )  # fmt: skip
            self._data[name] = data

        add("model.embed_tokens.weight", (300, 256), next(kinds))
        add("model.norm.weight", (256,), "F32")
        for layer in range(CONFIG.num_hidden_layers):
            for name, shape in MATRICES.items():
                add(f"model.layers.{layer}.{name}.weight", shape, next(kinds))
            for norm in ("input_layernorm", "post_attention_layernorm"):
                add(f"model.layers.{layer}.{norm}.weight", (256,), "F32")
        self.tensors = tensors

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        return self._data[name]


def token_ids(length: int) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(4)).tolist()


def logits(checkpoint: MemoryCheckpoint, quantization: str, int8_activations: bool, chunk: int = 40) -> torch.Tensor:
    ops = open_device("CPU").ops
    model = load_model(checkpoint, ops, WeightFormat(torch.float32, quantization, int8_activations), 512)
    return sequence_logits(model, ops, CONFIG, token_ids(40), torch.float32, chunk)


@pytest.mark.parametrize("types", [[name] for name in QUANTIZED_TYPES] + [["F16", *QUANTIZED_TYPES]], ids="-".join)
def test_blocks_kept_are_the_model_dequantised(types: list[str]) -> None:
    """To the bit, since weights unpacked in registers are added in the same order."""
    checkpoint = MemoryCheckpoint(types)
    expected = logits(checkpoint, "none", False)
    assert expected.isfinite().all()
    assert torch.equal(logits(checkpoint, "gguf", int8_activations=False), expected)
    near = logits(checkpoint, "gguf", int8_activations=True)
    assert (near - expected).norm() < 0.2 * expected.norm()  # random layers amplify what eight bits lose
    assert torch.equal(logits(checkpoint, "gguf", int8_activations=True, chunk=7), near)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_quantised_at_load_is_near(quantization: str) -> None:
    checkpoint = MemoryCheckpoint(["F16"])
    expected = logits(checkpoint, "none", False)
    error = (logits(checkpoint, quantization, False) - expected).norm() / expected.norm()
    assert error < {"int8": 0.05, "int4": 0.6}[quantization]


def test_blocks_that_hold_another_shape_are_named() -> None:
    checkpoint = MemoryCheckpoint(["Q4_K"])
    name = "model.layers.1.mlp.down_proj.weight"
    wrong = replace(checkpoint.tensors[name], shape=(512, 256))
    checkpoint.tensors = {**checkpoint.tensors, name: wrong}
    with pytest.raises(CheckpointError, match=f"{name}.*512, 256"):
        logits(checkpoint, "gguf", True)

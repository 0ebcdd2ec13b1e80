"""What of a loaded model every step reads."""

import math
from pathlib import Path

import pytest
import torch

from octavo.devices.registry import open_device
from octavo.kernels.ops import Ops
from octavo.layers.weights import WeightFormat
from octavo.models.loader import load_model, multiplied_weights, open_checkpoint
from tests.tiny_models import make_folder


@pytest.mark.parametrize("family", ["llama", "llama-tied-mha", "qwen2", "gemma3"])
def test_a_step_reads_each_matrix_once_but_an_embedding_only_as_the_head(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_folder(tmp_path / family, family)))
    weights = list(multiplied_weights(load_model(checkpoint, Ops(), WeightFormat(torch.float32), 64)))
    is_tied = checkpoint.config.tie_word_embeddings
    shapes = [info.shape for name, info in checkpoint.tensors.items() if is_tied or "embed_tokens" not in name]
    expected = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    assert sum(weight.num_rows * weight.num_cols for weight in weights) == expected


@pytest.mark.parametrize(("quantization", "bytes_per_weight"), [("none", 2), ("int8", 1.0625), ("int4", 0.625)])
def test_bytes_are_those_of_the_packed_form(quantization: str, bytes_per_weight: float, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    checkpoint = open_checkpoint(str(make_folder(tmp_path / "tiny", "llama", **sizes)))
    model = load_model(checkpoint, open_device("CPU").ops, WeightFormat(torch.bfloat16, quantization), 64)
    for weight in multiplied_weights(model):
        assert weight.data.nbytes == pytest.approx(bytes_per_weight * weight.num_rows * weight.num_cols, rel=0.05)

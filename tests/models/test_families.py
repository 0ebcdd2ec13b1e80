"""A family is one file: nothing else of the package names it."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import octavo.models
from octavo.errors import UnknownArchitectureError
from octavo.kernels.ops import Ops
from octavo.layers.weights import WeightFormat
from octavo.models.loader import families, load_model, open_checkpoint
from tests.checkpoint.gguf_files import HEADS, HIDDEN, write_gguf
from tests.models.driver import sequence_logits

OUTSIDE = '''
"""Llama, whose MLP is called otherwise, whose scores a key scales, and which has a GGUF architecture of its own."""

from dataclasses import dataclass
from typing import ClassVar

from octavo.checkpoint.gguf_names import LAYER_NAMES, GGUFNames
from octavo.checkpoint.hyper_parameters import hyper
from octavo.layers.attention import Attention
from octavo.models import llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Args(llama.Args):
    gguf: ClassVar[GGUFNames | None] = GGUFNames("outside", LAYER_NAMES)
    query_scale: float = hyper(0.5, gguf="attention.scale")


class Layer(llama.Layer):
    def make_attention(self, config, weights, index, cos_sin):
        return Attention(config, index, cos_sin, config.query_scale)


class Model(llama.Model):
    layer_class = Layer
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "outside.py").write_text(OUTSIDE)
    monkeypatch.setattr(octavo.models, "__path__", [*octavo.models.__path__, str(folder)])
    importlib.invalidate_caches()
    families.cache_clear()
    yield
    sys.modules.pop("octavo.models.outside", None)
    families.cache_clear()


def logits(path: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(str(path))
    model = load_model(checkpoint, Ops(), WeightFormat(torch.float32), 64)
    return sequence_logits(model, Ops(), checkpoint.config, [3, 4, 5, 6])


@pytest.mark.usefixtures("outside")
def test_a_file_outside_the_package_is_a_family(tmp_path: Path) -> None:
    scale = (HIDDEN // HEADS) ** -0.5
    own = write_gguf(tmp_path / "outside.gguf", "outside", {"outside.attention.scale": scale})
    other = write_gguf(tmp_path / "other.gguf", "outside", {"outside.attention.scale": 2 * scale})
    llama = write_gguf(tmp_path / "qwen2.gguf", "qwen2", {"tokenizer.ggml.pre": "qwen2"})
    assert open_checkpoint(str(own)).config.model_type == "outside"
    assert "outside" in families()
    assert logits(own).shape == logits(llama).shape
    assert not torch.equal(logits(own), logits(other))


def test_without_it_the_architecture_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match="'outside' is not supported; known: gemma3, llama"):
        open_checkpoint(str(write_gguf(tmp_path / "outside.gguf", "outside")))

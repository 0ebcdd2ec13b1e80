"""Qwen3, the dense models (Yang et al., 2025): Qwen2 with norms of query and key heads instead of biases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from octavo.checkpoint.fields import Fields
from octavo.checkpoint.gguf_names import LAYER_NAMES, GGUFNames
from octavo.checkpoint.hyper_parameters import hyper
from octavo.layers.attention import Attention
from octavo.layers.norm import RMSNorm
from octavo.layers.weights import WeightLoader
from octavo.models import llama, qwen2

__all__ = ["Args", "Model"]

HEAD_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Args(llama.Args):
    gguf: ClassVar[GGUFNames | None] = GGUFNames("qwen3", LAYER_NAMES | HEAD_NORMS)

    head_dim: int = hyper(128, gguf="attention.key_length")

    @classmethod
    def from_hf(cls, fields: Fields, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"sliding_windows": qwen2.Args.from_hf(fields, settings)["sliding_windows"]}


class Layer(llama.Layer):
    def make_attention(self, config: llama.Args, weights: WeightLoader, index: int, cos_sin: torch.Tensor) -> Attention:
        name = f"model.layers.{index}.self_attn"
        norms = [RMSNorm(weights, f"{name}.{part}_norm", config.head_dim, config.rms_norm_eps) for part in "qk"]
        return Attention(config, index, cos_sin, None, *norms)


class Model(llama.Model):
    layer_class = Layer

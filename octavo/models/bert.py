"""BERT (Devlin et al., 2019) without a head: an encoder, whose hidden states become embeddings.

Post-norm: the residual stream is what each norm gives. Checkpoint names are Hugging Face's, of BertModel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.checkpoint.fields import Fields
from octavo.checkpoint.hyper_parameters import hyper
from octavo.checkpoint.model_config import ModelConfig
from octavo.layers.context import StepContext
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.norm import PostLayerNorm
from octavo.layers.weights import WeightLoader

__all__ = ["Args", "Model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Args(ModelConfig):
    intermediate_size: int = hyper()
    layer_norm_eps: float = hyper(1e-12)
    type_vocab_size: int = hyper(2)
    """Kinds of segments that there is an embedding for; a text is of the first."""
    hidden_act: str = hyper("gelu")
    is_encoder: bool = True

    @classmethod
    def from_hf(cls, fields: Fields, settings: Mapping[str, Any]) -> dict[str, Any]:
        if fields.flag("is_decoder", False):
            fields.fail("is_decoder", "is true: BERT is supported as an encoder only.")
        kind = fields.text("position_embedding_type", "absolute")
        if kind != "absolute":
            fields.fail("position_embedding_type", f"is {kind[:80]!r}; absolute is supported.")
        return {"sliding_windows": ()}


class Layer:
    def __init__(self, config: Args, weights: WeightLoader, index: int) -> None:
        name, hidden, inner = f"encoder.layer.{index}", config.hidden_size, config.intermediate_size
        self.num_heads, self.scale = config.num_attention_heads, config.head_dim**-0.5
        qkv_names = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        self.qkv = Linear(weights, qkv_names, hidden, [hidden] * 3, True, "column")
        self.output = Linear(weights, [f"{name}.attention.output.dense"], hidden, [hidden], True, "row")
        self.attention_norm = PostLayerNorm(
            weights, f"{name}.attention.output.LayerNorm", hidden, config.layer_norm_eps
        )
        self.up = Linear(weights, [f"{name}.intermediate.dense"], hidden, [inner], True, "column")
        self.down = Linear(weights, [f"{name}.output.dense"], inner, [hidden], True, "row")
        self.output_norm = PostLayerNorm(weights, f"{name}.output.LayerNorm", hidden, config.layer_norm_eps)

    def __call__(self, hidden_states: torch.Tensor, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        qkv = self.qkv(hidden_states, ctx)
        attended = ctx.ops.encoder_attention(qkv, ctx.query_start, self.num_heads, self.scale)
        hidden_states = self.attention_norm.add(self.output(attended, ctx), residual, ctx)
        return self.output_norm.add(self.down(ctx.ops.gelu(self.up(hidden_states, ctx)), ctx), residual, ctx)


class Model:
    def __init__(self, config: Args, weights: WeightLoader, max_model_len: int) -> None:
        hidden = config.hidden_size
        self.embedding = Embedding(weights, "embeddings.word_embeddings", config)
        positions = weights.table("embeddings.position_embeddings.weight", (config.max_position_embeddings, hidden))
        types = weights.table("embeddings.token_type_embeddings.weight", (config.type_vocab_size, hidden))
        self.positions = positions[:max_model_len] + types[0]
        self.norm = PostLayerNorm(weights, "embeddings.LayerNorm", hidden, config.layer_norm_eps)
        self.layers = [Layer(config, weights, index) for index in range(config.num_hidden_layers)]

    def __call__(self, input_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # [T] int32 -> [T, H] float32
        residual = self.embedding(input_ids, ctx)
        hidden_states = self.norm.add(ctx.ops.gather_rows(self.positions, ctx.positions), residual, ctx)
        for layer in self.layers:
            hidden_states = layer(hidden_states, residual, ctx)
        return residual

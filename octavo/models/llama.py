"""Llama 1 to 3 (Touvron et al., 2023), SmolLM and every decoder of the same shape. Names are Hugging Face's."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from octavo.checkpoint.gguf_names import GGUFNames
from octavo.checkpoint.hyper_parameters import hyper
from octavo.checkpoint.model_config import ModelConfig
from octavo.layers.attention import Attention
from octavo.layers.context import StepContext
from octavo.layers.embedding import Decoder
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import rope_table
from octavo.layers.weights import WeightLoader

__all__ = ["Args", "Layer", "Model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Args(ModelConfig):
    gguf: ClassVar[GGUFNames | None] = GGUFNames("llama", interleaved_rope=True)

    intermediate_size: int = hyper(gguf="feed_forward_length")
    rms_norm_eps: float = hyper(1e-6, gguf="attention.layer_norm_rms_epsilon")
    attention_bias: bool = hyper(False, gguf_tensor="blk.0.attn_q.bias")
    attention_output_bias: bool = hyper(False, hf="attention_bias", gguf_tensor="blk.0.attn_output.bias")
    mlp_bias: bool = hyper(False, gguf_tensor="blk.0.ffn_up.bias")


class Layer:
    def __init__(self, config: Args, weights: WeightLoader, index: int, cos_sin: torch.Tensor) -> None:
        name, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
        q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        qkv_names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        self.qkv = Linear(weights, qkv_names, hidden, [q_size, kv_size, kv_size], config.attention_bias, "column")
        self.attention = self.make_attention(config, weights, index, cos_sin)
        output_names = [f"{name}.self_attn.o_proj"]
        self.output = Linear(weights, output_names, q_size, [hidden], config.attention_output_bias, "row")
        gate_up_names = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
        self.gate_up = Linear(weights, gate_up_names, hidden, [inner, inner], config.mlp_bias, "column")
        self.down = Linear(weights, [f"{name}.mlp.down_proj"], inner, [hidden], config.mlp_bias, "row")
        self.input_norm = RMSNorm(weights, f"{name}.input_layernorm", hidden, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps)

    def make_attention(self, config: Args, weights: WeightLoader, index: int, cos_sin: torch.Tensor) -> Attention:
        return Attention(config, index, cos_sin)

    def __call__(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm, ctx: StepContext
    ) -> torch.Tensor:
        """hidden_states [T, H], normed. The addition that ends a layer is fused with the norm that follows it."""
        attended = self.output(self.attention(self.qkv(hidden_states, ctx), ctx), ctx)
        hidden_states = self.mlp_norm.add(attended, residual, ctx)
        activated = ctx.ops.silu_mul(self.gate_up(hidden_states, ctx))
        return next_norm.add(self.down(activated, ctx), residual, ctx)


class Model(Decoder):
    layer_class: ClassVar[type[Layer]] = Layer

    def __init__(self, config: Args, weights: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, weights)
        cos_sin = weights.ops.place(rope_table(config, max_model_len))
        self.layers = [self.layer_class(config, weights, i, cos_sin) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(weights, "model.norm", config.hidden_size, config.rms_norm_eps)

    def __call__(self, input_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # [T] int32 -> [T, H]
        residual = self.embedding(input_ids, ctx)
        hidden_states = self.layers[0].input_norm(residual, ctx)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            hidden_states = layer(hidden_states, residual, next_norm, ctx)
        return hidden_states

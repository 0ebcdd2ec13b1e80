"""Gemma 3's text models (Gemma Team, 2025).

Norms before and after attention and MLP, norms of query and key heads, a scaled embedding, GeGLU; layers with a sliding
window have rotary angles of their own. Checkpoint names are Hugging Face's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from octavo.checkpoint.fields import Fields
from octavo.checkpoint.gguf_names import LAYER_NAMES, GGUFNames
from octavo.checkpoint.hf_config import read_rope, sliding_layers, sliding_window
from octavo.checkpoint.hyper_parameters import hyper
from octavo.checkpoint.model_config import ModelConfig, RopeConfig
from octavo.layers.attention import Attention
from octavo.layers.context import StepContext
from octavo.layers.embedding import Decoder
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import rope_table
from octavo.layers.weights import WeightLoader

__all__ = ["Args", "Model"]

GGUF_LAYER_NAMES = LAYER_NAMES | {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Args(ModelConfig):
    gguf: ClassVar[GGUFNames | None] = GGUFNames("gemma3", GGUF_LAYER_NAMES)

    intermediate_size: int = hyper(gguf="feed_forward_length")
    rms_norm_eps: float = hyper(1e-6, gguf="attention.layer_norm_rms_epsilon")
    rms_norm_offset: float = 0.0
    """What is added to the stored weights of norms, which are about 0 in Hugging Face's files."""
    hidden_act: str = hyper("gelu_pytorch_tanh", hf="hidden_activation")
    tie_word_embeddings: bool = hyper(True)
    attention_bias: bool = hyper(False, gguf_tensor="blk.0.attn_q.bias")
    attention_output_bias: bool = hyper(False, hf="attention_bias", gguf_tensor="blk.0.attn_output.bias")
    attention_scale: float | None = None
    """What scores are multiplied by, if not head_dim ** -0.5."""
    local_rope: RopeConfig | None = None
    """The rotary embedding of layers with a window."""

    @classmethod
    def from_hf(cls, fields: Fields, settings: Mapping[str, Any]) -> dict[str, Any]:
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if fields.get(key) is not None:
                fields.fail(key, "is set, which is not supported: Gemma 3 caps no logits.")
        if fields.flag("use_bidirectional_attention", False):
            fields.fail("use_bidirectional_attention", "is true, which is not supported.")
        period = fields.integer("sliding_window_pattern", 6)
        slides = sliding_layers(fields, [(i + 1) % period != 0 for i in range(settings["num_hidden_layers"])])
        window = sliding_window(fields)
        return {
            "head_dim": fields.integer("head_dim", 256),
            "rms_norm_offset": 1.0,
            "attention_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
            "sliding_windows": tuple(window if sliding else None for sliding in slides),
            "rope": _rope_of(fields, "full_attention", fields.number("rope_theta", 1_000_000.0)),
            "local_rope": _rope_of(fields, "sliding_attention", fields.number("rope_local_base_freq", 10_000.0)),
        }

    @classmethod
    def from_gguf(cls, fields: Fields, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Every sixth layer sees all; the others have a window, and rotary angles that no scaling concerns. Only the
        published size of 62 layers does not scale scores by head_dim."""
        period, windows = fields.integer("attention.sliding_window_pattern", 6), settings["sliding_windows"]
        is_largest = len(windows) == 62
        return {
            "sliding_windows": tuple(window if (i + 1) % period else None for i, window in enumerate(windows)),
            "local_rope": RopeConfig(rope_theta=fields.number("rope.freq_base_swa", 10_000.0)),
            "attention_scale": (settings["hidden_size"] / settings["num_attention_heads"]) ** -0.5
            if is_largest
            else None,
        }

    @property
    def longest_context(self) -> tuple[int, str]:
        """`max_position_embeddings` is the scaled length already."""
        return self.max_position_embeddings, "the model's max_position_embeddings"


def _rope_of(fields: Fields, layer_type: str, theta: float) -> RopeConfig:
    """The `rope_parameters` of one type of layers (transformers 5), or what they were before: `theta` and, for layers
    without a window, `rope_scaling`."""
    by_type = fields.get("rope_parameters")
    if by_type is not None and not (isinstance(by_type, dict) and all(isinstance(v, dict) for v in by_type.values())):
        fields.fail("rope_parameters", "is not one object for each type of layer.")
    parameters = None if by_type is None else by_type.get(layer_type)
    scaling = fields.get("rope_scaling") if layer_type == "full_attention" and by_type is None else None
    own = {"rope_theta": theta, "rope_parameters": parameters, "rope_scaling": scaling}
    return read_rope(Fields(fields.path, {**fields.values, **own}))


class Layer:
    def __init__(self, config: Args, weights: WeightLoader, index: int, cos_sin: torch.Tensor) -> None:
        name, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
        q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))

        def norm(part: str, size: int = hidden) -> RMSNorm:
            return RMSNorm(weights, f"{name}.{part}", size, config.rms_norm_eps, config.rms_norm_offset)

        qkv_names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        self.qkv = Linear(weights, qkv_names, hidden, [q_size, kv_size, kv_size], config.attention_bias, "column")
        head_norms = [norm(f"self_attn.{part}_norm", config.head_dim) for part in "qk"]
        self.attention = Attention(config, index, cos_sin, config.attention_scale, *head_norms)
        output_names = [f"{name}.self_attn.o_proj"]
        self.output = Linear(weights, output_names, q_size, [hidden], config.attention_output_bias, "row")
        gate_up_names = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
        self.gate_up = Linear(weights, gate_up_names, hidden, [inner, inner], False, "column")
        self.down = Linear(weights, [f"{name}.mlp.down_proj"], inner, [hidden], False, "row")
        self.input_norm = norm("input_layernorm")
        self.attended_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.output_norm = norm("post_feedforward_layernorm")

    def __call__(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm, ctx: StepContext
    ) -> torch.Tensor:
        """hidden_states [T, H], normed. What the inner norms read is not rounded before: they would amplify it."""
        attended = self.output(self.attention(self.qkv(hidden_states, ctx), ctx), ctx, torch.float32)
        hidden_states = self.mlp_norm.add(self.attended_norm(attended, ctx), residual, ctx)
        output = self.down(ctx.ops.gelu_tanh_mul(self.gate_up(hidden_states, ctx)), ctx, torch.float32)
        return next_norm.add(self.output_norm(output, ctx), residual, ctx)


class Model(Decoder):
    def __init__(self, config: Args, weights: WeightLoader, max_model_len: int) -> None:
        scale = torch.tensor(config.hidden_size**0.5, dtype=weights.format.dtype).item()  # rounded as in training
        super().__init__(config, weights, scale)
        cos_sin = local_cos_sin = weights.ops.place(rope_table(config, max_model_len))
        if config.local_rope is not None:
            local_cos_sin = weights.ops.place(rope_table(config, max_model_len, config.local_rope))
        self.layers = [
            Layer(config, weights, i, local_cos_sin if window else cos_sin)
            for i, window in enumerate(config.sliding_windows)
        ]
        self.norm = RMSNorm(weights, "model.norm", config.hidden_size, config.rms_norm_eps, config.rms_norm_offset)

    def __call__(self, input_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # [T] int32 -> [T, H]
        residual = self.embedding(input_ids, ctx)
        hidden_states = self.layers[0].input_norm(residual, ctx)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            hidden_states = layer(hidden_states, residual, next_norm, ctx)
        return hidden_states

"""Gemma 3's text models (Gemma Team, 2025).

Norms before and after attention and MLP, norms of query and key heads, a scaled embedding, GeGLU; layers with a sliding
window have rotary angles of their own. Checkpoint names are Hugging Face's.
"""

import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.kernels.sampling import SampleRows
from octavo.layers.attention import Attention
from octavo.layers.context import StepContext
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import rope_table
from octavo.layers.weights import WeightLoader

__all__ = ["Model"]


class Layer:
    def __init__(self, config: ModelConfig, weights: WeightLoader, index: int, cos_sin: torch.Tensor) -> None:
        name, hidden = f"model.layers.{index}", config.hidden_size
        q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))

        def norm(part: str, size: int = hidden) -> RMSNorm:
            return RMSNorm(weights, f"{name}.{part}", size, config.rms_norm_eps, config.rms_norm_offset)

        qkv_names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        self.qkv = Linear(weights, qkv_names, hidden, [q_size, kv_size, kv_size], config.attention_bias)
        q_norm, k_norm = norm("self_attn.q_norm", config.head_dim), norm("self_attn.k_norm", config.head_dim)
        self.attention = Attention(config, index, cos_sin, q_norm.weight, k_norm.weight)
        self.output = Linear(weights, [f"{name}.self_attn.o_proj"], q_size, [hidden], config.attention_output_bias)
        gate_up_names = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
        self.gate_up = Linear(weights, gate_up_names, hidden, [config.intermediate_size] * 2, bias=False)
        self.down = Linear(weights, [f"{name}.mlp.down_proj"], config.intermediate_size, [hidden], bias=False)
        self.input_norm = norm("input_layernorm")
        self.attended_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.output_norm = norm("post_feedforward_layernorm")


class Model:
    def __init__(self, config: ModelConfig, weights: WeightLoader, max_model_len: int) -> None:
        cos_sin = rope_table(config, max_model_len)
        local_cos_sin = cos_sin if config.local_rope is None else rope_table(config, max_model_len, config.local_rope)
        scale = torch.tensor(config.hidden_size**0.5, dtype=weights.format.dtype).item()  # rounded as in training
        self.embedding = Embedding(weights, "model.embed_tokens", config.vocab_size, config.hidden_size, scale)
        self.layers = [
            Layer(config, weights, i, local_cos_sin if window else cos_sin)
            for i, window in enumerate(config.sliding_windows)
        ]
        self.norm = RMSNorm(weights, "model.norm", config.hidden_size, config.rms_norm_eps, config.rms_norm_offset)
        if config.tie_word_embeddings:
            self.lm_head = LMHead(self.embedding.weight)
        else:
            self.lm_head = LMHead(weights.matrix(["lm_head.weight"], config.hidden_size, [config.vocab_size]))

    def __call__(self, input_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # [T] int32 -> [T, H]
        residual = self.embedding(input_ids, ctx)
        hidden_states = self.layers[0].input_norm(residual, ctx)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            # What the inner norms read is not rounded before: they would amplify it.
            attended = layer.output(layer.attention(layer.qkv(hidden_states, ctx), ctx), ctx, torch.float32)
            hidden_states = layer.mlp_norm.add(layer.attended_norm(attended, ctx), residual, ctx)
            activated = ctx.ops.gelu_tanh_mul(layer.gate_up(hidden_states, ctx))
            output = layer.down(activated, ctx, torch.float32)
            hidden_states = next_norm.add(layer.output_norm(output, ctx), residual, ctx)
        return hidden_states

    def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        return self.lm_head(hidden_states, rows, ctx)

    def most_likely(self, hidden_states: torch.Tensor, rows: torch.Tensor, draws: SampleRows, ctx: StepContext) -> None:
        self.lm_head.most_likely(hidden_states, rows, draws, ctx)

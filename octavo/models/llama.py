"""Llama 1 to 3, SmolLM and every decoder of the same shape; Mistral and Qwen2 differ only in configuration.

Touvron et al., 2023. Checkpoint names are Hugging Face's.
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
        qkv_names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        self.qkv = Linear(weights, qkv_names, hidden, [q_size, kv_size, kv_size], config.attention_bias)
        self.attention = Attention(config, index, cos_sin)
        self.output = Linear(weights, [f"{name}.self_attn.o_proj"], q_size, [hidden], config.attention_output_bias)
        gate_up_names = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
        self.gate_up = Linear(weights, gate_up_names, hidden, [config.intermediate_size] * 2, config.mlp_bias)
        self.down = Linear(weights, [f"{name}.mlp.down_proj"], config.intermediate_size, [hidden], config.mlp_bias)
        self.input_norm = RMSNorm(weights, f"{name}.input_layernorm", hidden, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps)


class Model:
    def __init__(self, config: ModelConfig, weights: WeightLoader, max_model_len: int) -> None:
        cos_sin = rope_table(config, max_model_len)
        self.embedding = Embedding(weights, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, weights, i, cos_sin) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(weights, "model.norm", config.hidden_size, config.rms_norm_eps)
        if config.tie_word_embeddings:
            self.lm_head = LMHead(self.embedding.weight)
        else:
            self.lm_head = LMHead(weights.matrix(["lm_head.weight"], config.hidden_size, [config.vocab_size]))

    def __call__(self, input_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # [T] int32 -> [T, H]
        residual = self.embedding(input_ids, ctx)
        hidden_states = self.layers[0].input_norm(residual, ctx)
        for layer, next_norm in zip(self.layers, self._norms_after_layers(), strict=True):
            attended = layer.output(layer.attention(layer.qkv(hidden_states, ctx), ctx), ctx)
            hidden_states = layer.mlp_norm.add(attended, residual, ctx)
            activated = ctx.ops.silu_mul(layer.gate_up(hidden_states, ctx))
            hidden_states = next_norm.add(layer.down(activated, ctx), residual, ctx)
        return hidden_states

    def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        return self.lm_head(hidden_states, rows, ctx)

    def most_likely(self, hidden_states: torch.Tensor, rows: torch.Tensor, draws: SampleRows, ctx: StepContext) -> None:
        self.lm_head.most_likely(hidden_states, rows, draws, ctx)

    def _norms_after_layers(self) -> list[RMSNorm]:
        """The addition that ends a layer is fused with the norm that follows: the next layer's, or the last."""
        return [*(layer.input_norm for layer in self.layers[1:]), self.norm]

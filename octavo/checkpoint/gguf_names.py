"""GGUFNames: what a GGUF architecture calls its tensors, beside Hugging Face's names of the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["LAYER_NAMES", "MODEL_NAMES", "GGUFNames"]

MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_gate.bias": "mlp.gate_proj.bias",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_down.bias": "mlp.down_proj.bias",
}
"""Those of a decoder of Llama's shape, within a layer."""


@dataclass(frozen=True, slots=True)
class GGUFNames:
    """A family's tensors. Names in `layers` stand behind `blk.N.` in the file and `model.layers.N.` in the model."""

    architecture: str
    """`general.architecture`."""
    layers: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    model: Mapping[str, str] = field(default_factory=lambda: MODEL_NAMES)
    interleaved_rope: bool = False
    """Rows of the query and key projections are ordered for interleaved rotary pairs."""

"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on query, key and value, and windows in some layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.checkpoint.fields import Fields
from octavo.checkpoint.gguf_names import GGUFNames
from octavo.checkpoint.hf_config import sliding_layers, sliding_window
from octavo.models import llama
from octavo.models.llama import Model

__all__ = ["Args", "Model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Args(llama.Args):
    gguf: ClassVar[GGUFNames | None] = GGUFNames("qwen2")

    @classmethod
    def from_hf(cls, fields: Fields, settings: Mapping[str, Any]) -> dict[str, Any]:
        window = sliding_window(fields) if fields.flag("use_sliding_window", False) else None
        first = fields.integer("max_window_layers", 28, low=0)
        slides = sliding_layers(fields, [layer >= first for layer in range(settings["num_hidden_layers"])])
        windows = tuple(window if sliding else None for sliding in slides)
        return {"attention_bias": True, "attention_output_bias": False, "mlp_bias": False, "sliding_windows": windows}

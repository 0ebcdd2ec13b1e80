"""Mistral (Jiang et al., 2023): Llama with a sliding window in all layers. GGUF files call it Llama."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.checkpoint.fields import Fields
from octavo.checkpoint.gguf_names import GGUFNames
from octavo.checkpoint.hf_config import sliding_window
from octavo.models import llama
from octavo.models.llama import Model

__all__ = ["Args", "Model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Args(llama.Args):
    gguf: ClassVar[GGUFNames | None] = None

    @classmethod
    def from_hf(cls, fields: Fields, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"sliding_windows": (sliding_window(fields),) * settings["num_hidden_layers"]}

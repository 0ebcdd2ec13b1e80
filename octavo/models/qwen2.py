"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on query, key and value, which the configuration carries."""

from octavo.models.llama import Model

__all__ = ["Model"]

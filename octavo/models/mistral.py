"""Mistral (Jiang et al., 2023): Llama with a sliding window, which the configuration carries."""

from octavo.models.llama import Model

__all__ = ["Model"]

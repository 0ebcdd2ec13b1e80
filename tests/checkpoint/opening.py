"""Checkpoints of one format, for all families; a small configuration."""

from pathlib import Path
from typing import Any

from octavo.checkpoint.folder import FolderCheckpoint
from octavo.checkpoint.gguf import GGUFCheckpoint
from octavo.models.loader import families

__all__ = ["OLD", "SIZES", "open_folder", "open_gguf"]

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
OLD: dict[str, Any] = {"model_type": "llama", **SIZES}
"""A config.json from before transformers 5."""


def open_folder(path: Path) -> FolderCheckpoint:
    return FolderCheckpoint(path, families())


def open_gguf(path: Path) -> GGUFCheckpoint:
    return GGUFCheckpoint(path, families())

"""Checkpoints of one format, for all families."""

from pathlib import Path

from octavo.checkpoint.folder import FolderCheckpoint
from octavo.checkpoint.gguf import GGUFCheckpoint
from octavo.models.loader import families

__all__ = ["open_folder", "open_gguf"]


def open_folder(path: Path) -> FolderCheckpoint:
    return FolderCheckpoint(path, families())


def open_gguf(path: Path) -> GGUFCheckpoint:
    return GGUFCheckpoint(path, families())

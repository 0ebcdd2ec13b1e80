"""open_checkpoint: from what a user typed, a path or a Hub name, to an open Checkpoint.

Knows where models can be; the readers know what is in them.
"""

import os
import re
from pathlib import Path

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.folder import FolderCheckpoint
from octavo.checkpoint.gguf import GGUFCheckpoint
from octavo.checkpoint.hub import fetch, group_ggufs
from octavo.checkpoint.weight_files import find_weight_files
from octavo.errors import CheckpointError

__all__ = ["open_checkpoint"]

HUB_NAME = re.compile(r"(?P<repo>(?:\w[\w.-]*/)?\w[\w.-]*)(?::(?P<wanted>.+))?", re.ASCII)


def open_checkpoint(model: str, download_dir: str | None = None, revision: str | None = None) -> Checkpoint:
    """Open a .gguf file, a Hugging Face folder, a folder with one GGUF model, or a model of the Hub.

    Hub names are `ORG/NAME`, `ORG/NAME:FILE.gguf` or `ORG/NAME:Q4_K_M`; `download_dir` is the cache to use and
    `revision` a branch, tag or commit, both for Hub names only. Raises CheckpointError.
    """
    path = Path(os.path.expanduser(model))
    if model and os.path.exists(path):
        return _open_path(path)
    match = HUB_NAME.fullmatch(model)
    if match is None or (model.endswith(".gguf") and not match["wanted"]):
        raise CheckpointError(
            f"{model!r}: no such file or folder (looked in {Path.cwd()}), and not a Hub name, ORG/NAME."
        )
    return _open_path(fetch(match["repo"], match["wanted"] or "", download_dir, revision))


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: weights alone are no model. Give the folder that holds them and config.json.")
    return GGUFCheckpoint(path)


def _open_folder(folder: Path) -> Checkpoint:
    """GGUF repositories often keep a config.json too: it makes a folder only together with safetensors."""
    has_config = (folder / "config.json").exists()
    names = [path.name for path in folder.iterdir()]
    if has_config and find_weight_files(names, str(folder)) is not None:
        return FolderCheckpoint(folder)
    groups = group_ggufs(names)
    if len(groups) == 1:
        (parts,) = groups.values()
        return GGUFCheckpoint(folder / parts[0])
    if groups:
        raise CheckpointError(f"{folder}: there are {len(groups)} GGUF models. Give one's path: {', '.join(groups)}.")
    if has_config:
        return FolderCheckpoint(folder)  # says which weights are missing
    raise CheckpointError(f"{folder}: not a model: neither config.json nor a .gguf file is there.")

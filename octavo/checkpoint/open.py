"""From what a user typed, a path or a Hub name, to the model's place, its vocabulary, and an open Checkpoint.

Knows where models can be; the readers know what is in them.
"""

import os
import re
from pathlib import Path

from octavo.checkpoint.checkpoint import Checkpoint, Vocabulary
from octavo.checkpoint.folder import FolderCheckpoint
from octavo.checkpoint.gguf import GGUFCheckpoint, open_vocabulary
from octavo.checkpoint.hub import fetch, group_ggufs
from octavo.checkpoint.model_config import Families
from octavo.checkpoint.weight_files import find_weight_files
from octavo.errors import CheckpointError

__all__ = ["find_model", "open_checkpoint", "open_text"]

HUB_NAME = re.compile(r"(?P<repo>(?:\w[\w.-]*/)?\w[\w.-]*)(?::(?P<wanted>.+))?", re.ASCII)


def open_checkpoint(
    model: str, families: Families, download_dir: str | None = None, revision: str | None = None
) -> Checkpoint:
    """Open a model of one of the families. Raises CheckpointError; `find_model` says what `model` may be."""
    path = find_model(model, download_dir, revision)
    return FolderCheckpoint(path, families) if path.is_dir() else GGUFCheckpoint(path, families)


def open_text(
    model: str, download_dir: str | None = None, revision: str | None = None
) -> tuple[Path, Vocabulary | None]:
    """Where a model's tokenizer files are: a folder, or a GGUF file and its vocabulary. Opens no weights."""
    path = find_model(model, download_dir, revision)
    return (path, None) if path.is_dir() else open_vocabulary(path)


def find_model(model: str, download_dir: str | None = None, revision: str | None = None) -> Path:
    """A .gguf file or a Hugging Face folder, for the path of one, of a folder with one GGUF model, or a Hub name.

    Hub names are `ORG/NAME`, `ORG/NAME:FILE.gguf` or `ORG/NAME:Q4_K_M`; `download_dir` is the cache to use and
    `revision` a branch, tag or commit, both for Hub names only. Raises CheckpointError.
    """
    path = Path(os.path.expanduser(model))
    if model and os.path.exists(path):
        return _find_in(path)
    match = HUB_NAME.fullmatch(model)
    if match is None or (model.endswith(".gguf") and not match["wanted"]):
        raise CheckpointError(
            f"{model!r}: no such file or folder (looked in {Path.cwd()}), and not a Hub name, ORG/NAME."
        )
    return _find_in(fetch(match["repo"], match["wanted"] or "", download_dir, revision))


def _find_in(path: Path) -> Path:
    if path.is_dir():
        return _find_in_folder(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: weights alone are no model. Give the folder that holds them and config.json.")
    return path


def _find_in_folder(folder: Path) -> Path:
    """GGUF repositories often keep a config.json too: it makes a folder only together with safetensors."""
    has_config = (folder / "config.json").exists()
    names = [path.name for path in folder.iterdir()]
    if has_config and find_weight_files(names, str(folder)) is not None:
        return folder
    groups = group_ggufs(names)
    if len(groups) == 1:
        (parts,) = groups.values()
        return folder / parts[0]
    if groups:
        raise CheckpointError(f"{folder}: there are {len(groups)} GGUF models. Give one's path: {', '.join(groups)}.")
    if has_config:
        return folder  # opening it says which weights are missing
    raise CheckpointError(f"{folder}: not a model: neither config.json nor a .gguf file is there.")

"""Models on the Hugging Face Hub: which files of a repository make a checkpoint, from the cache or else downloaded.

Knows file names, not their contents. What is in the cache is used without asking the network.
"""

import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path

from octavo.checkpoint.gguf import SPLIT_NAME
from octavo.checkpoint.weight_files import WeightFiles, find_weight_files
from octavo.errors import CheckpointError

__all__ = ["fetch", "group_ggufs"]

FOLDER_FILE = re.compile(r"[^/]+\.(json|model|txt|jinja)")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
NOT_MODELS = re.compile(r"(mmproj|imatrix).*", re.IGNORECASE)


def group_ggufs(files: Sequence[str]) -> dict[str, list[str]]:
    """GGUF models among `files`: the path without its suffix, and the file or the parts of a split model, in order."""
    groups: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and not NOT_MODELS.fullmatch(file.rpartition("/")[2]):
            match = SPLIT_NAME.fullmatch(file)
            groups.setdefault(match["stem"] if match else file.removesuffix(".gguf"), []).append(file)
    return groups


def fetch(repo: str, wanted: str, download_dir: str | None, revision: str | None) -> Path:
    """The folder, or the GGUF file (the first part), of a Hub model on this machine's disk.

    `wanted` is a GGUF file's name or the quantisation in it, such as Q4_K_M, or empty. Raises CheckpointError.
    """
    from huggingface_hub import constants, snapshot_download  # 0.3 s: only when a Hub name was given
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(repo, revision=revision, cache_dir=download_dir, local_files_only=True)
    except LocalEntryNotFoundError as error:  # newer versions tell an incomplete snapshot, which may hold all we need
        snapshot = getattr(error, "snapshot_path", None) or ""
    except ValueError as error:
        raise CheckpointError(f"{repo!r} is neither a file or folder here nor a Hub name: {error}") from None
    if snapshot and (cached := _find_cached(Path(snapshot), wanted)):
        return cached
    if constants.HF_HUB_OFFLINE:
        state = "only in part" if snapshot else "not"
        raise CheckpointError(
            f"{repo}{':' + wanted if wanted else ''} is no file or folder here, it is {state} in the cache "
            f"{download_dir or constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids a download. Unset it, or give the "
            "path of a folder or a .gguf file."
        )
    return _download(repo, wanted, download_dir, revision)


def _download(repo: str, wanted: str, download_dir: str | None, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        files = select_files(HfApi().list_repo_files(repo, revision=revision), wanted, f"{repo} on the Hub")
        patterns = [glob.escape(file) for file in files]
        folder = Path(snapshot_download(repo, revision=revision, cache_dir=download_dir, allow_patterns=patterns))
    except CheckpointError:
        raise
    except GatedRepoError:
        reason = (
            f"is gated. Accept its terms at https://huggingface.co/{repo}, then set HF_TOKEN or run `hf auth login`."
        )
        raise CheckpointError(f"{repo} {reason}") from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{repo} has no revision {revision!r} on the Hub (--revision).") from None
    except RepositoryNotFoundError:
        reason = "is no file or folder here, and the Hub has no such model, or it is private: then set HF_TOKEN."
        raise CheckpointError(f"{repo} {reason}") from None
    except Exception as error:  # the client's network errors differ from version to version
        raise CheckpointError(
            f"{repo} is no file or folder here, it is not in the cache, and the Hub could not be asked: "
            f"{type(error).__name__}: {error}. Give the path of a folder or a .gguf file, or try again."
        ) from error
    return folder / files[0] if files[0].endswith(".gguf") else folder


def select_files(files: Sequence[str], wanted: str, where: str) -> list[str]:
    """The files that make the checkpoint: of a folder, or one GGUF model's parts in order. Raises CheckpointError."""
    weights = _folder_weights(files, where) if not wanted and "config.json" in files else None
    if weights is not None:
        chosen = {weights.index, *weights.files}
        return [file for file in files if file in chosen or FOLDER_FILE.fullmatch(file)]
    groups = group_ggufs(files)
    if not groups:
        sought = f"a .gguf file for {wanted!r}" if wanted else "model.safetensors or a .gguf file"
        pytorch = " PyTorch's .bin files are not read." if any(file.endswith(".bin") for file in files) else ""
        raise CheckpointError(f"{where}: looked for {sought}, found none.{pytorch}")
    names = [name for name, parts in groups.items() if _is_wanted(name, parts, wanted)]
    if len(names) == 1:
        return groups[names[0]]
    problem = f"{len(names)} GGUF models match {wanted!r}" if wanted else f"there are {len(names)} GGUF models"
    raise CheckpointError(
        f"{where}: {problem}. Name one after a colon, such as NAME:FILE.gguf or NAME:Q8_0. There are: "
        f"{', '.join(groups)}."
    )


def _folder_weights(files: Sequence[str], where: str) -> WeightFiles | None:
    return find_weight_files([file for file in files if "/" not in file], where)


def _is_wanted(name: str, parts: list[str], wanted: str) -> bool:
    suffix = rf"(^|[-._/]){re.escape(wanted.removesuffix('.gguf'))}$"
    return not wanted or wanted in parts or re.search(suffix, name, re.IGNORECASE) is not None


def _find_cached(snapshot: Path, wanted: str) -> Path | None:
    """What `fetch` returns, if this snapshot has all of it."""
    present = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    try:
        files = select_files(present, wanted, str(snapshot))
    except CheckpointError:
        return None
    if files[0].endswith(".gguf"):
        match = SPLIT_NAME.fullmatch(Path(files[0]).name)
        return snapshot / files[0] if match is None or len(files) == int(match["count"]) else None
    has_tokenizer = any(name in files for name in TOKENIZER_FILES)
    return snapshot if has_tokenizer and _has_all_shards(snapshot, files) else None


def _has_all_shards(snapshot: Path, files: Sequence[str]) -> bool:
    weights = _folder_weights(files, str(snapshot))
    if weights is None or weights.index is None:
        return weights is not None
    try:
        index = json.loads((snapshot / weights.index).read_bytes())
        return set(index["weight_map"].values()) <= set(files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False

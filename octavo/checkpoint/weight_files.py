"""Which safetensors files of a folder or repository are its weights, by their names alone. Reads no file."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from octavo.errors import CheckpointError

__all__ = ["INDEX", "SINGLE", "WeightFiles", "find_weight_files"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"(?P<stem>.+)-(?P<part>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})\.safetensors")
NOT_WEIGHTS = re.compile(r"(adapter_|consolidated|optimizer).*")
"""Adapters, training state, and weights in their publisher's own names."""
MAX_SHARDS = 10_000


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """An index and the files that it may name, or the files alone."""

    index: str | None
    files: tuple[str, ...]


def find_weight_files(names: Collection[str], where: str) -> WeightFiles | None:
    """The weights among the file `names` of one folder, which `where` names in messages; None if there are none.

    One file of Hugging Face's name comes first, then an index, then shards or a file of any name. Raises
    CheckpointError for shards that are not complete, and for several models.
    """
    if SINGLE in names:
        return WeightFiles(None, (SINGLE,))
    weights = sorted(name for name in names if name.endswith(".safetensors") and not NOT_WEIGHTS.match(name))
    indices = sorted(name for name in names if name.endswith(".safetensors.index.json") and not NOT_WEIGHTS.match(name))
    if INDEX in indices or len(indices) == 1:
        index = INDEX if INDEX in indices else indices[0]
        stem = index.removesuffix(".safetensors.index.json")
        return WeightFiles(index, tuple(name for name in weights if name.startswith(stem)))
    groups: dict[str, list[str]] = {}
    for name in weights:
        match = SHARD.fullmatch(name)
        groups.setdefault(match["stem"] if match else name.removesuffix(".safetensors"), []).append(name)
    if not groups:
        return None
    if len(groups) > 1 and "model" not in groups:
        raise CheckpointError(
            f"{where}: there are several sets of weights and no {INDEX}: {', '.join(groups)[:300]}. Keep one."
        )
    files = groups.get("model") or next(iter(groups.values()))
    _check_complete(files, where)
    return WeightFiles(None, tuple(files))


def _check_complete(files: list[str], where: str) -> None:
    matches = [match for file in files if (match := SHARD.fullmatch(file))]
    if not matches:
        return
    counts = {int(match["count"]) for match in matches}
    count = max(counts)
    missing = sorted(set(range(1, min(count, MAX_SHARDS) + 1)) - {int(match["part"]) for match in matches})
    if len(counts) > 1 or count > MAX_SHARDS or len(matches) != len(files):
        raise CheckpointError(f"{where}: {', '.join(files)[:300]} are not the shards of one model.")
    if missing:
        shown = ", ".join(map(str, missing[:5]))
        raise CheckpointError(f"{where}: of {count} shards, {len(missing)} are missing: {shown}.")

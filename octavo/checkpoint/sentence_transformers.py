"""The files that sentence-transformers keeps beside a model: how its hidden states become one vector.

modules.json lists the modules after the transformer; a pooling has a config.json in a folder of its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.fields import Fields
from octavo.checkpoint.model_config import PoolingConfig, PoolingMode
from octavo.checkpoint.safetensors import parse_json
from octavo.errors import CheckpointError

__all__ = ["read_max_sequence_length", "read_pooling"]

MODES: Mapping[str, PoolingMode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
NAMES: Mapping[str, PoolingMode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
"""By `pooling_mode`, which newer files have instead of the flags."""
MAX_FILE_BYTES = 1_000_000


def read_pooling(folder: Path, config: Mapping[str, Any]) -> PoolingConfig | None:
    """What modules.json asks for, `config` being config.json's object; None without that file.

    Raises CheckpointError for a module or a pooling that octavo does not have.
    """
    path = folder / "modules.json"
    if not path.exists():
        return None
    modules = Fields(path, _read(path, wrapped=True)).get("modules")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path}: is not a list of modules.")
    mode: PoolingMode | None = None
    normalize = False
    for module in (Fields(path, values) for values in modules):
        kind = module.text("type").rsplit(".", 1)[-1]
        if kind == "Pooling":
            mode = _pooling_mode(folder / _inner_folder(module) / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            module.fail("type", f"is {kind[:80]!r}; Transformer, Pooling and Normalize are supported.")
    if mode is None:
        raise CheckpointError(f"{path}: has no Pooling module.")
    return PoolingConfig(mode=mode, normalize=normalize, dimensions=_dimensions(folder / "config.json", config))


def read_max_sequence_length(folder: Path) -> int | None:
    """Tokens at which sentence-transformers cuts a text off, where its file says so."""
    path = folder / "sentence_bert_config.json"
    return Fields(path, _read(path)).optional_integer("max_seq_length", low=1) if path.exists() else None


def _inner_folder(module: Fields) -> str:
    name = module.text("path")
    if Path(name).name != name or "\0" in name:
        module.fail("path", f"is {name[:80]!r}, which is not the name of a folder.")
    return name


def _pooling_mode(path: Path) -> PoolingMode:
    fields = Fields(path, _read(path))
    name = fields.optional_text("pooling_mode")
    if name is not None:
        if name not in NAMES:
            fields.fail("pooling_mode", f"is {name[:80]!r}; supported: {', '.join(NAMES)}.")
        return NAMES[name]
    chosen = [key for key in fields.values if key.startswith("pooling_mode_") and fields.flag(key, False)]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise CheckpointError(
            f"{path}: pools by {', '.join(chosen)[:200] or 'nothing'}; supported is one of {', '.join(MODES)}."
        )
    return MODES[chosen[0]]


def _dimensions(path: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """As vLLM reads them from config.json: `matryoshka_dimensions`, or `is_matryoshka` for any."""
    fields = Fields(path, config)
    listed = fields.get("matryoshka_dimensions")
    if listed is None:
        return None if fields.flag("is_matryoshka", False) else ()
    if not isinstance(listed, list) or not all(type(item) is int and item > 0 for item in listed):
        fields.fail("matryoshka_dimensions", "is not a list of sizes.")
    return tuple(sorted(listed))


def _read(path: Path, wrapped: bool = False) -> dict[str, Any]:
    """The file's object; `wrapped`: the file holds a list, which becomes the object's `modules`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path}: is larger than {MAX_FILE_BYTES} bytes.")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}.") from error
    return parse_json(path, b'{"modules": %b}' % text if wrapped else text, "the file")

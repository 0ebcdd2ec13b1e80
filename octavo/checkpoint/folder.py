"""FolderCheckpoint: a Hugging Face folder with config.json and weights in one or several safetensors files.

Owns which files make a checkpoint; `hf_config` and `safetensors` own their contents.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.checkpoint import Vocabulary
from octavo.checkpoint.hf_config import parse_config
from octavo.checkpoint.model_config import Families, ModelConfig, TensorInfo
from octavo.checkpoint.safetensors import SafetensorsFile, parse_json
from octavo.checkpoint.sentence_transformers import read_max_sequence_length, read_pooling
from octavo.checkpoint.tokenizer_files import read_token_facts
from octavo.checkpoint.weight_files import INDEX, SINGLE, find_weight_files
from octavo.errors import CheckpointError

__all__ = ["FolderCheckpoint"]

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
UNUSED = re.compile(
    r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb(_local)?\..*"  # follow from the configuration
    r"|model\.layers\.[0-9]+\.(self_attn|attn)\.(bias|masked_bias)"  # old versions' causal masks
    r"|embeddings\.(position_ids|token_type_ids)|pooler\..*|cls\..*"  # BERT's constants, and heads for other tasks
)
"""Tensors that a checkpoint may have and no model needs."""
BARE_DECODER = re.compile(r"(layers\.|embed_tokens\.|norm\.|rotary_emb(_local)?\.).*")
MAX_JSON_BYTES = 100_000_000


class FolderCheckpoint:
    """A folder opened as a Checkpoint."""

    def __init__(self, path: Path, families: Families) -> None:
        """Raises CheckpointError naming the file and the key or tensor at fault."""
        self.path = path
        config_path, generation_path = path / "config.json", path / "generation_config.json"
        values = _read_json(config_path)
        generation = _read_json(generation_path) if generation_path.exists() else {}
        self.vocabulary: Vocabulary | None = None
        config = parse_config(config_path, values, generation, families)
        files, weight_map = _open_weights(path)
        tensors = _merge(files, weight_map)
        tokens = read_token_facts(path)
        self.config: ModelConfig = replace(
            config,
            dtype=config.dtype or _main_dtype(tensors),
            pooling=read_pooling(path, values),
            max_sequence_length=read_max_sequence_length(path),
            eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *tokens.turn_end_ids))),
        ).without_padding(tokens.num_tokens)
        if self.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        self.tensors: Mapping[str, TensorInfo] = tensors
        self._mapped = {file.path: file.file for file in files}

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        info = self.tensors[name]
        return self._mapped[info.path].view(info.offset, info.num_bytes)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: is larger than {MAX_JSON_BYTES} bytes.")
        return parse_json(path, path.read_bytes(), "the file")
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}.") from error


def _open_weights(folder: Path) -> tuple[list[SafetensorsFile], dict[str, str]]:
    """The files, and the file that each tensor is taken from where an index says so."""
    found = find_weight_files([path.name for path in folder.iterdir()], str(folder)) if folder.is_dir() else None
    if found is None:
        raise CheckpointError(f"{folder}: {_why_no_weights(folder)}")
    if found.index is None:
        return [SafetensorsFile(folder / name) for name in found.files], {}
    index_path = folder / found.index
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(shard) for shard in weight_map.values()):
        raise CheckpointError(f"{index_path}: weight_map is not an object of tensor names and file names.")
    files = {}
    for name, shard in weight_map.items():
        if shard not in files:
            if not (folder / shard).exists():
                raise CheckpointError(f"{folder}: {shard} is missing; {found.index} says that it holds {name!r}.")
            files[shard] = SafetensorsFile(folder / shard)
        if name not in files[shard].tensors:
            raise CheckpointError(f"{folder / shard}: tensor {name!r} is missing; {found.index} says that it is there.")
    return list(files.values()), weight_map


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and value.endswith(".safetensors") and Path(value).name == value and "\0" not in value


def _why_no_weights(folder: Path) -> str:
    message = f"no weights: neither {SINGLE} nor {INDEX} is there."
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return (
            f"{message} PyTorch's .bin and .pth files are not read, because opening one can run code. Convert them to "
            "safetensors: transformers' from_pretrained(...).save_pretrained(...) writes it."
        )
    return message


def _merge(files: list[SafetensorsFile], weight_map: Mapping[str, str]) -> dict[str, TensorInfo]:
    """All tensors by the name that models ask for. A tensor that an index places is taken from there alone."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for stored_name, info in file.tensors.items():
            name = _model_name(stored_name)
            if UNUSED.fullmatch(name) or weight_map.get(stored_name, file.path.name) != file.path.name:
                continue
            if name in tensors:
                raise CheckpointError(f"{file.path}: tensor {name!r} is also in {tensors[name].path.name}.")
            tensors[name] = info if name == stored_name else replace(info, name=name)
    return tensors


def _model_name(name: str) -> str:
    """A tensor's name as model files ask for it, whether it was saved with a head, without one, or before 2020."""
    if BARE_DECODER.fullmatch(name):
        return f"model.{name}"
    name = name.removeprefix("bert.")
    for old, new in ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias")):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _main_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    types = Counter(info.dtype for info in tensors.values() if len(info.shape) > 1)
    name = types.most_common(1)[0][0] if types else "BF16"
    return DTYPES.get(name, name)

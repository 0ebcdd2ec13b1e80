"""GGUFCheckpoint: a GGUF file's keys and tensors in Hugging Face's words, for the families it is given.

Owns what all architectures have in common, as llama.cpp reads them; families own their names, `gguf_format` the bytes.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.checkpoint import Vocabulary
from octavo.checkpoint.fields import Fields
from octavo.checkpoint.generation_config import GGUF_KEYS, renamed
from octavo.checkpoint.gguf_format import GGUFFile, GGUFTensor
from octavo.checkpoint.gguf_names import GGUFNames
from octavo.checkpoint.gguf_vocabulary import end_of_turn_ids, read_vocabulary
from octavo.checkpoint.hyper_parameters import read_gguf_keys
from octavo.checkpoint.model_config import Families, ModelConfig, RopeConfig, TensorInfo
from octavo.errors import CheckpointError, UnknownArchitectureError

__all__ = ["GGUFCheckpoint", "open_vocabulary"]

SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<part>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
UNUSED = 5
"""The type of a token that fills the vocabulary up."""
ROPE_FREQS = "rope_freqs.weight"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

UNUSED_LAYER_NAMES = ("attn_rot_embd.weight",)
"""Rotary frequencies that some converters store; they follow from the metadata."""


class GGUFCheckpoint:
    """A GGUF file, or all files of a split one, opened as a Checkpoint."""

    def __init__(self, path: Path, families: Families) -> None:
        """Raises CheckpointError naming the file and the key or tensor at fault."""
        self._files = _open_files(path)
        first = self._files[0]
        self.path = first.path
        model_type, family, names = _find_family(first, families)
        self.vocabulary: Vocabulary | None = read_vocabulary(first)
        located = _locate_tensors(self._files)
        rope_freqs = located.pop(ROPE_FREQS, None)
        divisors = None if rope_freqs is None else _read_divisors(*rope_freqs)
        source = _Source(first, located, divisors, self.vocabulary)
        self.config = _read_config(source, model_type, family, names)
        self.tensors: Mapping[str, TensorInfo] = _map_tensors(located, names, self.config)
        self._mapped = {file.path: file.file for file in self._files}

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        info = self.tensors[name]
        return self._mapped[info.path].view(info.offset, info.num_bytes)


Located = dict[str, tuple[GGUFFile, GGUFTensor]]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the configuration is read from."""

    file: GGUFFile
    tensors: Located
    divisors: tuple[float, ...] | None
    vocabulary: Vocabulary | None


def _find_family(file: GGUFFile, families: Families) -> tuple[str, type[ModelConfig], GGUFNames]:
    """The model type, the class of its configuration and its names."""
    architecture = Fields(file.path, file.metadata).text("general.architecture")
    known = {
        family.gguf.architecture: (model_type, family, family.gguf)
        for model_type, family in families.items()
        if family.gguf is not None
    }
    if architecture not in known:
        raise UnknownArchitectureError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; known: {', '.join(sorted(known))}."
        )
    return known[architecture]


def open_vocabulary(path: Path) -> tuple[Path, Vocabulary | None]:
    """The file that holds a GGUF model's vocabulary, and the vocabulary."""
    first = _open_files(path)[0]
    return first.path, read_vocabulary(first)


def _open_files(path: Path) -> list[GGUFFile]:
    """The file, or every part of the split model that it belongs to."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        file = GGUFFile(path)
        if Fields(path, file.metadata).integer("split.count", 1, low=0) > 1:
            raise CheckpointError(f"{path}: one part of a split model, but not named like NAME-00001-of-00002.gguf.")
        return [file]
    count = int(match["count"])
    files = []
    for part in range(1, count + 1):
        file = GGUFFile(path.with_name(f"{match['stem']}-{part:05d}-of-{match['count']}.gguf"))
        number = Fields(file.path, file.metadata).integer("split.no", part - 1, low=0)
        if number != part - 1:
            raise CheckpointError(f"{file.path}: split.no is {number} where the file's name says {part - 1}.")
        files.append(file)
    if not files:
        raise CheckpointError(f"{path}: the name says that the model has {count} parts.")
    return files


def _locate_tensors(files: list[GGUFFile]) -> Located:
    located: Located = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in located:
                raise CheckpointError(f"{file.path}: tensor {name!r} is also in {located[name][0].path.name}.")
            located[name] = (file, tensor)
    first = files[0]
    expected = Fields(first.path, first.metadata).integer("split.tensors.count", len(located), low=0)
    if expected != len(located):
        raise CheckpointError(f"{first.path}: split.tensors.count is {expected} but there are {len(located)} tensors.")
    return located


def _read_divisors(file: GGUFFile, tensor: GGUFTensor) -> tuple[float, ...]:
    if tensor.type.name != "F32":
        raise CheckpointError(f"{file.path}: tensor {tensor.name!r} is {tensor.type.name}; F32 is expected.")
    values = file.file.view(tensor.offset, tensor.num_bytes).view("<f4")
    if not np.all(np.isfinite(values) & (values > 0)):
        raise CheckpointError(f"{file.path}: tensor {tensor.name!r} has values that are not numbers above 0.")
    return tuple(values.tolist())


def _read_config(source: _Source, model_type: str, family: type[ModelConfig], names: GGUFNames) -> ModelConfig:
    file, located, vocabulary = source.file, source.tensors, source.vocabulary
    fields = Fields(file.path, file.metadata, prefix=f"{names.architecture}.")
    settings = read_gguf_keys(family, fields, located)
    num_layers, head_dim = settings["num_hidden_layers"], settings["head_dim"]
    if fields.integer("attention.value_length", head_dim) != head_dim:
        fields.fail("attention.value_length", f"differs from the keys' length, {head_dim}, which is not supported.")
    window = fields.optional_integer("attention.sliding_window")
    embedding = located.get("token_embd.weight")
    num_tokens = len(vocabulary.tokens) if vocabulary is not None else None
    settings["vocab_size"] = (
        embedding[1].shape[0] if embedding is not None else fields.integer("vocab_size", num_tokens)
    )
    settings["tie_word_embeddings"] = "output.weight" not in located
    settings["sliding_windows"] = (window or None,) * num_layers
    settings["rope"] = _read_rope(fields, head_dim, source.divisors)
    settings |= family.from_gguf(fields, settings)
    return (
        family(
            model_type=model_type,
            **settings,
            dtype=_main_dtype(located),
            bos_token_id=vocabulary.bos_token_id if vocabulary is not None else None,
            eos_token_ids=end_of_turn_ids(file, vocabulary) if vocabulary is not None else (),
            sampling_defaults=renamed(file.metadata, GGUF_KEYS),
        )
        .check(file.path)
        .without_padding(_num_tokens(vocabulary))
    )


def _num_tokens(vocabulary: Vocabulary | None) -> int | None:
    """Up to the last token; converters add unused ones, until there are as many as the embedding has rows."""
    if vocabulary is None:
        return None
    used = np.flatnonzero(vocabulary.token_types != UNUSED)
    return int(used[-1]) + 1 if len(used) else None


def _read_rope(fields: Fields, head_dim: int, divisors: tuple[float, ...] | None) -> RopeConfig:
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        fields.fail("rope.dimension_count", f"is {rotated}; only the whole head, {head_dim}, is supported.")
    if divisors is not None and len(divisors) * 2 != head_dim:
        raise CheckpointError(f"{fields.path}: tensor {ROPE_FREQS!r} has {len(divisors)} values, not {head_dim // 2}.")
    theta = fields.number("rope.freq_base", 10_000.0)
    scaling = fields.text("rope.scaling.type", "linear")
    factor = _scaling_factor(fields)
    if scaling not in ("none", "linear", "yarn"):
        fields.fail("rope.scaling.type", f"is {scaling!r}; none, linear and yarn are supported.")
    if scaling == "none" or factor == 1.0:
        return RopeConfig(rope_theta=theta, frequency_divisors=divisors)
    if scaling == "linear":
        return RopeConfig(rope_type="linear", rope_theta=theta, factor=factor, frequency_divisors=divisors)
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        fields.fail("rope.scaling.yarn_ext_factor", "is not 1, which is not supported.")
    on_attention = fields.number("rope.scaling.attn_factor", 1.0) * fields.number("rope.scaling.yarn_attn_factor", 1.0)
    return RopeConfig(
        rope_type="yarn",
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        attention_factor=None if on_attention == 1.0 else on_attention * (1.0 + 0.1 * math.log(factor)),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        frequency_divisors=divisors,
    )


def _scaling_factor(fields: Fields) -> float:
    """0 stands for "no scaling" in files; `scale_linear` is the key's old name."""
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        value = fields.get(key)
        if value is not None and not (isinstance(value, float) and value == 0.0):
            return fields.number(key)
    return 1.0


def _main_dtype(located: Located) -> str:
    """The type that most matrices have."""
    types = Counter(tensor.type.name for _, tensor in located.values() if len(tensor.shape) > 1)
    name = types.most_common(1)[0][0] if types else "F32"
    return DTYPES.get(name, name)


def _map_tensors(located: Located, names: GGUFNames, config: ModelConfig) -> dict[str, TensorInfo]:
    hf_names = dict(names.model)
    unused: set[str] = set()
    for layer in range(config.num_hidden_layers):
        for gguf_name, hf_name in names.layers.items():
            hf_names[f"blk.{layer}.{gguf_name}"] = f"model.layers.{layer}.{hf_name}"
        unused.update(f"blk.{layer}.{gguf_name}" for gguf_name in UNUSED_LAYER_NAMES)
    tensors = {}
    for name, (file, tensor) in located.items():
        if name in unused:
            continue
        if name not in hf_names:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} has no place in a {config.model_type} model of "
                f"{config.num_hidden_layers} layers."
            )
        tensors[hf_names[name]] = TensorInfo(
            name=hf_names[name],
            shape=tensor.shape,
            dtype=tensor.type.name,
            path=file.path,
            offset=tensor.offset,
            num_bytes=tensor.num_bytes,
            rope_interleaved_heads=_interleaved_heads(name, config) if names.interleaved_rope else 0,
        )
    return tensors


def _interleaved_heads(name: str, config: ModelConfig) -> int:
    if ".attn_q." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".attn_k." in name else 0

"""Hugging Face's config.json as a family's configuration, with transformers' defaults.

Reads no file; knows no family, but what families' configurations are made of: declared keys, rotary scalings, windows.
"""

import math
from pathlib import Path
from typing import Any

from octavo.checkpoint.fields import Fields
from octavo.checkpoint.generation_config import HF_KEYS, renamed
from octavo.checkpoint.hyper_parameters import read_hf_keys
from octavo.checkpoint.model_config import Families, ModelConfig, RopeConfig
from octavo.errors import UnknownArchitectureError

__all__ = ["parse_config", "read_rope", "sliding_layers", "sliding_window"]

DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def parse_config(path: Path, values: dict[str, Any], generation: dict[str, Any], families: Families) -> ModelConfig:
    """`values` is config.json's object, `path` its place, `generation` generation_config.json's object or empty.

    The result's dtype is empty where config.json names none. Raises CheckpointError naming path and key,
    UnknownArchitectureError for a model_type that isn't in `families`.
    """
    config = Fields(path, values)
    model_type = config.text("model_type", "")
    if model_type not in families:
        raise UnknownArchitectureError(
            f"{path}: model_type {model_type[:80]!r} is not supported; known: {', '.join(sorted(families))}."
        )
    if config.get("quantization_config") is not None:
        config.fail("quantization_config", "is set: quantised Hugging Face checkpoints are not supported.")
    family = families[model_type]
    settings = read_hf_keys(family, config)
    settings["sliding_windows"] = (None,) * settings["num_hidden_layers"]
    settings |= family.from_hf(config, settings)
    if "rope" not in settings:
        settings["rope"] = read_rope(config)
    return family(
        model_type=model_type,
        **settings,
        dtype=_dtype(config),
        eos_token_ids=_token_ids(Fields(path.with_name("generation_config.json"), generation), "eos_token_id")
        or _token_ids(config, "eos_token_id"),
        bos_token_id=config.optional_token_id("bos_token_id"),
        sampling_defaults=renamed(generation, HF_KEYS),
    ).check(path)


def sliding_layers(fields: Fields, default: list[bool]) -> list[bool]:
    """Which layers have a window."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return default
    if not isinstance(layer_types, list) or len(layer_types) != len(default):
        fields.fail("layer_types", f"is not a list of {len(default)} entries, one a layer.")
    unknown = [t for t in layer_types if t not in ("sliding_attention", "full_attention")]
    if unknown:
        fields.fail("layer_types", f"has {str(unknown[0])[:80]!r}; sliding_attention and full_attention are known.")
    return [layer_type == "sliding_attention" for layer_type in layer_types]


def sliding_window(fields: Fields) -> int | None:
    """null is no window; an absent key is transformers' default."""
    if "sliding_window" not in fields.values:
        return 4096
    return fields.optional_integer("sliding_window", low=1)


def _dtype(fields: Fields) -> str:
    dtype = fields.text("dtype", fields.text("torch_dtype", ""))
    return dtype if dtype in DTYPES else ""


def _token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    value = fields.get(key)
    if isinstance(value, list):
        ids = [Fields(fields.path, {key: item}).optional_token_id(key) for item in value]
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    single = fields.optional_token_id(key)
    return () if single is None else (single,)


def read_rope(fields: Fields) -> RopeConfig:
    """`rope_parameters`, or what stood in its place before transformers 5."""
    rope = _rope_fields(fields)
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        rope.fail("rope_type", f"is {rope_type[:80]!r}; supported: {', '.join(ROPE_TYPES)}.")
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        rope.fail("partial_rotary_factor", "is not 1: rotating a part of each head is not supported.")
    if not rope.flag("truncate", True):
        rope.fail("truncate", "is false, which is not supported.")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if rope_type == "default":
        return RopeConfig(rope_theta=theta)
    length = fields.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", length)
    original = fields.integer("original_max_position_embeddings", original)  # some files keep it beside
    factor = rope.number("factor", length / original if rope_type == "yarn" else None)
    return RopeConfig(
        rope_type=rope_type,
        rope_theta=theta,
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor", None if rope_type == "llama3" else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if rope_type == "llama3" else 4.0),
        original_max_position_embeddings=original,
        attention_factor=_attention_factor(rope, factor),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
    )


def _rope_fields(fields: Fields) -> Fields:
    """`rope_parameters` (transformers 5), or `rope_scaling`, with `rope_theta` beside it (before)."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    values = {} if fields.get(key) is None else fields.get(key)
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        fields.fail(key, "is not one flat object for all layers.")
    return Fields(fields.path, {f"{key}.{name}": value for name, value in values.items()}, prefix=f"{key}.")


def _attention_factor(rope: Fields, factor: float) -> float | None:
    """YaRN's, where the file gives it or the two `mscale` values it follows from."""
    given = rope.optional_number("attention_factor")
    mscale, mscale_all_dim = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    if given is not None or mscale is None or mscale_all_dim is None or factor <= 1.0:
        return given
    return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * mscale_all_dim * math.log(factor) + 1.0)

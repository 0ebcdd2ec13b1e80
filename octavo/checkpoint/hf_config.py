"""Hugging Face's config.json as a ModelConfig, with transformers' defaults, for the model types known here.

Reads no file; knows nothing of tensors. The table PARSERS is the list of what can be read.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.checkpoint.fields import Fields
from octavo.checkpoint.generation_config import HF_KEYS, renamed
from octavo.checkpoint.model_config import MAX_LAYERS, ModelConfig, RopeConfig
from octavo.errors import UnknownArchitectureError

__all__ = ["PARSERS", "parse_config"]

DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def parse_config(path: Path, values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """`values` is config.json's object, `path` its place, `generation` generation_config.json's object or empty.

    The result's dtype is empty where config.json names none. Raises CheckpointError naming path and key,
    UnknownArchitectureError for a model_type that isn't in PARSERS.
    """
    fields = Fields(path, values)
    model_type = fields.text("model_type", "")
    if model_type not in PARSERS:
        raise UnknownArchitectureError(
            f"{path}: model_type {model_type[:80]!r} is not supported; known: {', '.join(sorted(PARSERS))}."
        )
    if fields.get("quantization_config") is not None:
        fields.fail("quantization_config", "is set: quantised Hugging Face checkpoints are not supported.")
    settings = _sizes(fields)
    settings |= PARSERS[model_type](fields, settings["num_hidden_layers"])
    if "rope" not in settings:
        settings["rope"] = _rope(fields)
    return ModelConfig(
        model_type=model_type,
        **settings,
        dtype=_dtype(fields),
        eos_token_ids=_token_ids(Fields(path.with_name("generation_config.json"), generation), "eos_token_id")
        or _token_ids(fields, "eos_token_id"),
        bos_token_id=fields.optional_token_id("bos_token_id"),
        sampling_defaults=renamed(generation, HF_KEYS),
    ).check(path)


def _sizes(fields: Fields) -> dict[str, Any]:
    """What every model type has, by the same keys."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("head_dim", low=1)
    if head_dim is None and hidden_size % num_heads:
        fields.fail("hidden_size", f"is {hidden_size}, which {num_heads} attention heads can't share evenly.")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_hidden_layers": fields.integer("num_hidden_layers", high=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim or hidden_size // num_heads,
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "hidden_act": fields.text("hidden_act", "silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }


def _llama(fields: Fields, num_layers: int) -> dict[str, Any]:
    attention_bias = fields.flag("attention_bias", False)
    return {
        "attention_bias": attention_bias,
        "attention_output_bias": attention_bias,
        "mlp_bias": fields.flag("mlp_bias", False),
        "sliding_windows": (None,) * num_layers,
    }


def _mistral(fields: Fields, num_layers: int) -> dict[str, Any]:
    return {"sliding_windows": (_window(fields),) * num_layers}


def _qwen2(fields: Fields, num_layers: int) -> dict[str, Any]:
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, low=0)
    slides = _sliding_layers(fields, [layer >= first for layer in range(num_layers)])
    return {"attention_bias": True, "sliding_windows": tuple(window if sliding else None for sliding in slides)}


def _sliding_layers(fields: Fields, default: list[bool]) -> list[bool]:
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


def _gemma3(fields: Fields, num_layers: int) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(key) is not None:
            fields.fail(key, "is set, which is not supported: Gemma 3 caps no logits.")
    if fields.flag("use_bidirectional_attention", False):
        fields.fail("use_bidirectional_attention", "is true, which is not supported.")
    period = fields.integer("sliding_window_pattern", 6)
    slides = _sliding_layers(fields, [(layer + 1) % period != 0 for layer in range(num_layers)])
    attention_bias, window = fields.flag("attention_bias", False), _window(fields)
    return {
        "head_dim": fields.integer("head_dim", 256),
        "hidden_act": fields.text("hidden_activation", "gelu_pytorch_tanh"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "attention_bias": attention_bias,
        "attention_output_bias": attention_bias,
        "attention_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "rms_norm_offset": 1.0,
        "sliding_windows": tuple(window if sliding else None for sliding in slides),
        "rope": _rope_of_layers(fields, "full_attention", fields.number("rope_theta", 1_000_000.0)),
        "local_rope": _rope_of_layers(fields, "sliding_attention", fields.number("rope_local_base_freq", 10_000.0)),
    }


def _rope_of_layers(fields: Fields, layer_type: str, theta: float) -> RopeConfig:
    """Of the layers of one type: their `rope_parameters` (transformers 5), or (before) `theta` and, for those without a
    window, `rope_scaling`."""
    by_type = fields.get("rope_parameters")
    if by_type is not None and not (isinstance(by_type, dict) and all(isinstance(v, dict) for v in by_type.values())):
        fields.fail("rope_parameters", "is not one object for each type of layer.")
    parameters = None if by_type is None else by_type.get(layer_type)
    scaling = fields.get("rope_scaling") if layer_type == "full_attention" and by_type is None else None
    own = {"rope_theta": theta, "rope_parameters": parameters, "rope_scaling": scaling}
    return _rope(Fields(fields.path, {**fields.values, **own}))


def _bert(fields: Fields, num_layers: int) -> dict[str, Any]:
    if fields.flag("is_decoder", False):
        fields.fail("is_decoder", "is true: BERT is supported as an encoder only.")
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "absolute":
        fields.fail("position_embedding_type", f"is {kind[:80]!r}; absolute is supported.")
    return {
        "is_encoder": True,
        "layer_norm_eps": fields.number("layer_norm_eps", 1e-12),
        "type_vocab_size": fields.integer("type_vocab_size", 2),
        "hidden_act": fields.text("hidden_act", "gelu"),
    }


PARSERS: dict[str, Callable[[Fields, int], dict[str, Any]]] = {
    "bert": _bert,
    "gemma3_text": _gemma3,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
}


def _window(fields: Fields) -> int | None:
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


def _rope(fields: Fields) -> RopeConfig:
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

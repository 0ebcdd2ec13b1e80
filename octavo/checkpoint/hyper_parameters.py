"""Hyper-parameters that the fields of a dataclass declare: where files hold them, and how they are read from there.

Knows no family, and no more of file formats than their keys.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from octavo.checkpoint.fields import MAX_INTEGER, Fields

__all__ = ["MAX_LAYERS", "hyper", "read_gguf_keys", "read_hf_keys"]

MAX_LAYERS = 10_000
"""More than any model has: a damaged count must not become that many objects."""


@dataclass(frozen=True, slots=True)
class _Place:
    hf: str | None
    gguf: str | None
    gguf_tensor: str | None
    is_derived: bool
    high: int


def hyper(
    default: Any = MISSING,
    *,
    hf: str | None = None,
    gguf: str | None = None,
    gguf_tensor: str | None = None,
    is_derived: bool = False,
    high: int = MAX_INTEGER,
) -> Any:
    """A field that files hold: in config.json by its own name, or by `hf`.

    `default` is transformers' value for an absent key. A GGUF file has it by the key `gguf`, which it must have, behind
    the architecture's name; or it is a flag that says whether there is a tensor `gguf_tensor`; else it keeps its
    default. `is_derived`: without its key it follows from other fields. `high` bounds integers.
    """
    return field(default=default, metadata={"place": _Place(hf, gguf, gguf_tensor, is_derived, high)})


def read_hf_keys(family: type, config: Fields) -> dict[str, Any]:
    """What the fields of `family` declare, as config.json has it, or as it follows."""
    settings = {}
    for declared, place in _declared(family):
        key = place.hf or declared.name
        if not place.is_derived or config.get(key) is not None:
            default = None if declared.default is MISSING else declared.default
            settings[declared.name] = _read(config, key, declared, default, place.high)
    return settings | _derived(config, settings)


def read_gguf_keys(family: type, metadata: Fields, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a GGUF file's keys and tensors' names. `vocab_size` is not among them."""
    settings: dict[str, Any] = {}
    for declared, place in _declared(family):
        if place.gguf_tensor is not None:
            settings[declared.name] = place.gguf_tensor in tensors
        elif place.gguf is not None and not (place.is_derived and metadata.get(place.gguf) is None):
            settings[declared.name] = _read(
                metadata.same_in_all_layers(place.gguf), place.gguf, declared, None, place.high
            )
    return settings | _derived(metadata, settings)


def _declared(family: type) -> "list[tuple[Field[Any], _Place]]":
    return [(declared, declared.metadata["place"]) for declared in fields(family) if "place" in declared.metadata]


def _read(source: Fields, key: str, declared: "Field[Any]", default: Any, high: int) -> Any:
    """The value as the field's type has it: an integer, a number above 0, a flag or a text."""
    if declared.type is int:
        return source.integer(key, default, high=high)
    if declared.type is float:
        return source.number(key, default)
    return source.flag(key, default) if declared.type is bool else source.text(key, default)


def _derived(source: Fields, settings: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of heads that the file leaves out."""
    hidden_size, num_heads = settings["hidden_size"], settings["num_attention_heads"]
    if "head_dim" not in settings and hidden_size % num_heads:
        source.fail("hidden_size", f"is {hidden_size}, which {num_heads} attention heads can't share evenly.")
    return {
        "num_key_value_heads": settings.get("num_key_value_heads", num_heads),
        "head_dim": settings.get("head_dim", hidden_size // num_heads),
    }

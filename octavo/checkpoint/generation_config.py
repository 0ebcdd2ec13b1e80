"""Sampling defaults that a checkpoint comes with: generation_config.json's, or a GGUF file's `general.sampling` keys.

Takes the keys that vLLM takes. Values are checked when they are used, so that a bad one does not keep a model from
being opened.
"""

import json
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError, InvalidRequestError
from octavo.sampling_params import SamplingParams

__all__ = ["GGUF_KEYS", "HF_KEYS", "renamed", "resolve_sampling_defaults"]

HF_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's names, and those of SamplingParams."""
GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
FLOAT32_DIGITS = 7


def renamed(values: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The values that are there, under the names of SamplingParams. float32's noise is rounded away: 0.6, not
    0.60000002."""
    found = {name: values[key] for key, name in keys.items() if values.get(key) is not None}
    return {
        name: float(f"{value:.{FLOAT32_DIGITS}g}") if isinstance(value, float) else value
        for name, value in found.items()
    }


def resolve_sampling_defaults(own: Mapping[str, Any], source: str, override: str | None) -> dict[str, int | float]:
    """What requests get that say nothing. `own`: the checkpoint's; `source` and `override`: --generation-config and
    --override-generation-config. Raises ConfigError for a value out of range."""
    defaults = dict(own) if source == "auto" else {}
    if override is not None:
        defaults |= _parse(override)
    try:
        SamplingParams(**defaults)
    except (InvalidRequestError, TypeError) as error:
        raise ConfigError(
            f"The model's sampling defaults can't be used: {error} Leave them out with --generation-config none, or "
            "set others with --override-generation-config."
        ) from error
    return defaults


def _parse(override: str) -> dict[str, Any]:
    try:
        values = json.loads(override)
    except ValueError as error:
        raise ConfigError(f"--override-generation-config is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--override-generation-config must be a JSON object, got {override[:80]}.")
    if unknown := values.keys() - HF_KEYS.keys():
        raise ConfigError(f"--override-generation-config can't set {min(unknown)!r}; it can set {', '.join(HF_KEYS)}.")
    return renamed(values, HF_KEYS)

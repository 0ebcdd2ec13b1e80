"""Sampling defaults that a checkpoint comes with: generation_config.json's, or a GGUF file's `general.sampling` keys.

Takes the keys that vLLM takes. Values are checked when they are used, so that a bad one does not keep a model from
being opened.
"""

import json
import logging
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
WHOLE_NUMBERS = frozenset({"top_k", "max_tokens"})
"""Fields that some tools write as floats."""

logger = logging.getLogger(__name__)


def renamed(values: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The values that are there, under the names of SamplingParams. float32's noise is rounded away: 0.6, not
    0.60000002; a whole number is an integer where one is asked for."""
    found = {name: values[key] for key, name in keys.items() if values.get(key) is not None}
    return {name: _plain(value, name) for name, value in found.items()}


def _plain(value: Any, name: str) -> Any:
    if not isinstance(value, float):
        return value
    if name in WHOLE_NUMBERS and value.is_integer():
        return int(value)
    return float(f"{value:.{FLOAT32_DIGITS}g}")


def resolve_sampling_defaults(own: Mapping[str, Any], source: str, override: str | None) -> dict[str, int | float]:
    """What requests get that say nothing. `own`: the checkpoint's; `source` and `override`: --generation-config and
    --override-generation-config.

    A value of the checkpoint's that is out of range is left out, with a warning. Raises ConfigError for one of the
    user's.
    """
    defaults = _sensible(own) if source == "auto" else {}
    if override is not None:
        defaults |= _parse(override)
    try:
        SamplingParams(**defaults)
    except (InvalidRequestError, TypeError) as error:
        raise ConfigError(f"The sampling defaults of --override-generation-config can't be used: {error}") from error
    return defaults


def _sensible(own: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that SamplingParams takes."""
    defaults = {}
    for name, value in own.items():
        try:
            SamplingParams(**{name: value})
            if (name, value) == ("max_tokens", 0):
                raise InvalidRequestError("max_tokens must be above 0 to be a default.")
        except (InvalidRequestError, TypeError) as error:
            logger.warning("A sampling default of the model's is left out: %s", error)
        else:
            defaults[name] = value
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

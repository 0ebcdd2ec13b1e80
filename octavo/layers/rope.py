"""Rotary frequencies for every scaling a supported checkpoint can ask for, as one table of cosines and sines.

Computed in float32 as transformers computes them, so that logits agree at any position.
"""

import math

import torch

from octavo.checkpoint.model_config import ModelConfig, RopeConfig
from octavo.errors import CheckpointError

__all__ = ["rope_table"]


def rope_table(config: ModelConfig, max_model_len: int, rope: RopeConfig | None = None) -> torch.Tensor:
    """[max_model_len, head_dim] float32: cosines of each position's head_dim / 2 angles, then their sines.

    `rope` is the model's own by default.
    """
    rope = rope or config.rope
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / rope.rope_theta**exponents
    frequencies, scale = _scale_frequencies(frequencies, rope, config)
    if rope.frequency_divisors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    angles = torch.arange(max_model_len, dtype=torch.float32).unsqueeze(1) * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1)


def _scale_frequencies(frequencies: torch.Tensor, rope: RopeConfig, config: ModelConfig) -> tuple[torch.Tensor, float]:
    """The scaled frequencies, and the factor on cosines and sines."""
    match rope.rope_type:
        case "default" | "dynamic":  # which slows frequencies beyond max_position_embeddings only, where no text goes
            return frequencies, 1.0
        case "linear":
            return frequencies / rope.factor, 1.0
        case "llama3":
            return _llama3(frequencies, rope), 1.0
        case "yarn":
            return _yarn(frequencies, rope, config)
        case other:
            raise CheckpointError(
                f"Rotary embedding of type {other!r} is not supported; supported are default, dynamic, "
                "linear, llama3 and yarn."
            )


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise CheckpointError(f"Rotary scaling {rope.rope_type!r} needs original_max_position_embeddings.")
    return rope.original_max_position_embeddings


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    turns = _original_length(rope) * frequencies / (2 * math.pi)  # over the original context
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * keep + frequencies / rope.factor * (1.0 - keep)


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, config: ModelConfig) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): a ramp between kept and slowed frequencies, and a temperature on attention."""
    original = _original_length(rope)

    def dimension_that_turns(times: float) -> float:
        return config.head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low = max(math.floor(dimension_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_that_turns(rope.beta_slow)), config.head_dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    scaled = frequencies * (1.0 - ramp) + frequencies / rope.factor * ramp
    temperature = rope.attention_factor
    if temperature is None:
        temperature = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0
    return scaled, temperature

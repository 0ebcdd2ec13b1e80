"""The families that there are, checkpoints of theirs, and their models, built with a checkpoint's weights.

Every file beside this one is a family, named as Hugging Face's model_type: `Args`, its hyper-parameters, and `Model`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Protocol, cast

import torch

import octavo.models
from octavo.checkpoint import open as checkpoint_open
from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.model_config import ModelConfig
from octavo.errors import UnknownArchitectureError
from octavo.kernels.ops import Ops, Weight
from octavo.layers.context import StepContext
from octavo.layers.embedding import LMHead
from octavo.layers.linear import Linear
from octavo.layers.weights import WeightFormat, WeightLoader

__all__ = [
    "CausalLM",
    "Encoder",
    "families",
    "known_model_types",
    "load_encoder",
    "load_model",
    "multiplied_weights",
    "open_checkpoint",
]

NOT_MODELS = {"loader"}


class Encoder(Protocol):
    """What every file in `octavo/models` provides as `Model`."""

    def __call__(self, input_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """input_ids [T] int32 -> hidden states [T, hidden_size] after the last norm."""
        ...


class CausalLM(Encoder, Protocol):
    """What the `Model` of a decoder provides beside."""

    def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """hidden_states as returned, rows [S] int32 -> logits [S, vocab_size] float32 of these tokens."""
        ...

    def most_likely(
        self, hidden_states: torch.Tensor, rows: torch.Tensor, draws: torch.Tensor, ctx: StepContext
    ) -> None:
        """Fill in `draws` [S, DRAW_BYTES] by these logits, which need not be stored: all of temperature 0 and without
        masks."""
        ...


def known_model_types() -> list[str]:
    return sorted(
        module.name for module in pkgutil.iter_modules(octavo.models.__path__) if module.name not in NOT_MODELS
    )


@cache
def families() -> Mapping[str, type[ModelConfig]]:
    """The class of the configuration by model_type."""
    return {name: _module(name).Args for name in known_model_types()}


def open_checkpoint(model: str, download_dir: str | None = None, revision: str | None = None) -> Checkpoint:
    """Open what the user typed, a path or a Hub name, of one of the families here. Raises CheckpointError."""
    return checkpoint_open.open_checkpoint(model, families(), download_dir, revision)


def _module(model_type: str) -> ModuleType:
    return importlib.import_module(f"octavo.models.{model_type}")


def load_model(
    checkpoint: Checkpoint,
    ops: Ops,
    weight_format: WeightFormat,
    max_model_len: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> CausalLM:
    """Build the checkpoint's model, a decoder.

    Raises CheckpointError for weights that are missing, surplus or misshapen, UnknownArchitectureError for a model_type
    without a file here.
    """
    return cast(CausalLM, _load(checkpoint, checkpoint.config, ops, weight_format, max_model_len, on_bytes))


def load_encoder(
    checkpoint: Checkpoint,
    ops: Ops,
    weight_format: WeightFormat,
    max_model_len: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Encoder:
    """As `load_model`, for hidden states only: an encoder, or a decoder, whose head is not loaded if it has one."""
    headless = replace(checkpoint.config, tie_word_embeddings=True)
    return _load(checkpoint, headless, ops, weight_format, max_model_len, on_bytes)


def _load(
    checkpoint: Checkpoint,
    config: ModelConfig,
    ops: Ops,
    weight_format: WeightFormat,
    max_model_len: int,
    on_bytes: Callable[[int], None],
) -> Encoder:
    model_type = config.model_type
    if model_type not in known_model_types():
        raise UnknownArchitectureError(
            f"{checkpoint.path}: model type {model_type!r} is not supported; supported are "
            f"{', '.join(known_model_types())}."
        )
    weights = WeightLoader(checkpoint, ops, weight_format, on_bytes)
    model = cast(Encoder, _module(model_type).Model(config, weights, max_model_len))
    weights.finish(ignored=("lm_head.weight",) if config.tie_word_embeddings else ())
    return model


def multiplied_weights(part: object) -> Iterator[Weight]:
    """The matrices of a model, a layer or a list of these that are read whole in every step, however few its tokens.

    An embedding, of which a token needs one row, is among them only where it is the output head too.
    """
    if isinstance(part, Linear | LMHead):
        yield part.weight
        return
    for inner in part if isinstance(part, list) else getattr(part, "__dict__", {}).values():
        yield from multiplied_weights(inner)

"""Checkpoint: the one interface to a model's files, whichever format they are in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.model_config import ModelConfig, TensorInfo

__all__ = ["Checkpoint", "Vocabulary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A GGUF file's own tokenizer data (`tokenizer.ggml.*`)."""

    model: str
    """"gpt2": byte-level BPE. "llama": SentencePiece BPE with scores and byte fallback."""
    pre: str
    """Pre-tokenizer's name, such as "smollm", "llama-bpe", "qwen2"; "default" where the file has none."""
    tokens: list[str]
    token_types: npt.NDArray[np.int32]
    """1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    scores: npt.NDArray[np.float32] | None
    merges: list[str] | None
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_space_prefix: bool | None
    chat_template: str | None
    """The default template's source."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Other templates by name."""


class Checkpoint(Protocol):
    """A model's files, opened: configuration parsed, tensors indexed, nothing read yet but headers.

    Opening raises CheckpointError (UnknownArchitectureError) that names the file, key or tensor at fault.
    """

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every weight by its Hugging Face name."""
        ...

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The GGUF vocabulary; None for a folder, whose tokenizer files lie in `path`."""
        ...

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as a one-dimensional read-only view of the mapped file."""
        ...

"""ModelConfig and TensorInfo: what a checkpoint says of itself, in Hugging Face's words, whatever its file format.

Pure data. Each file in `octavo/models` extends ModelConfig by the hyper-parameters that its family alone has; readers
(`hf_config`, `gguf`) fill them in by what its fields declare; the engine reads what all models have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from octavo.checkpoint.fields import Fields
from octavo.checkpoint.gguf_names import GGUFNames
from octavo.checkpoint.hyper_parameters import MAX_LAYERS, hyper
from octavo.core.kv_groups import KVGroup, group_layers
from octavo.errors import CheckpointError

__all__ = [
    "Families",
    "ModelConfig",
    "PoolingConfig",
    "PoolingMode",
    "RopeConfig",
    "TensorInfo",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: Hugging Face's `rope_parameters`, defaults filled in."""

    rope_type: str = "default"
    """default, linear, dynamic, llama3 or yarn."""
    rope_theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    frequency_divisors: tuple[float, ...] | None = None
    """One divisor a frequency, where the file carries the scaling as a tensor (GGUF `rope_freqs.weight`)."""


PoolingMode = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How an embedding model makes one vector of a text's hidden states."""

    mode: PoolingMode
    """Their mean, the first token's, or the last token's."""
    normalize: bool = True
    """Scale the vector to length 1."""
    dimensions: tuple[int, ...] | None = ()
    """Sizes that the vector may be cut to (matryoshka embeddings); None: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine must know of every transformer, decoder or encoder. Field names are Hugging Face's."""

    gguf: ClassVar[GGUFNames | None] = None
    """What GGUF files call the family and its tensors; None: there are none."""

    model_type: str
    """Hugging Face's model_type; names the file in `octavo/models`."""
    vocab_size: int = hyper()
    """Tokens that can be read and sampled."""
    num_padding_tokens: int = 0
    """Rows of the embedding after those, which no text belongs to."""
    hidden_size: int = hyper(gguf="embedding_length")
    num_hidden_layers: int = hyper(gguf="block_count", high=MAX_LAYERS)
    num_attention_heads: int = hyper(gguf="attention.head_count")
    num_key_value_heads: int = hyper(gguf="attention.head_count_kv", is_derived=True)
    head_dim: int = hyper(gguf="attention.key_length", is_derived=True)
    max_position_embeddings: int = hyper(gguf="context_length")
    hidden_act: str = hyper("silu")
    tie_word_embeddings: bool = hyper(False)
    is_encoder: bool = False
    """Attention goes in both directions: a text is computed whole, and gives hidden states, no next token."""
    sliding_windows: tuple[int | None, ...] = ()
    """One entry a layer: the number of latest positions a token attends to, itself included; None for all."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    dtype: str = "bfloat16"
    """The checkpoint's own: float32, bfloat16, float16, or the GGUF block type that most of its matrices have."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a turn, from generation_config.json, config.json or the vocabulary."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the checkpoint recommends, by the names of SamplingParams; unchecked."""
    pooling: PoolingConfig | None = None
    """What sentence-transformers' files beside the weights say; None where there are none."""
    max_sequence_length: int | None = None
    """Where they cut texts off; no longer than `max_position_embeddings`."""

    @classmethod
    def from_hf(cls, fields: Fields, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What config.json says beyond the declared fields, which are read into `settings`."""
        return {}

    @classmethod
    def from_gguf(cls, fields: Fields, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What a GGUF file's keys say beyond the declared fields, which are read into `settings`."""
        return {}

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers by the block table that they share; none in an encoder."""
        if self.is_encoder:
            return ()
        return group_layers(self.sliding_windows or (None,) * self.num_hidden_layers)

    @property
    def longest_context(self) -> tuple[int, str]:
        """Positions the model was made for, and where the number comes from."""
        longest, rope = self.max_position_embeddings, self.rope
        if rope.rope_type == "yarn" and rope.original_max_position_embeddings is not None:
            scaled = int(rope.original_max_position_embeddings * rope.factor)
        else:  # llama3's max_position_embeddings is the scaled length already
            scaled = int(longest * rope.factor) if rope.rope_type == "linear" else longest
        if scaled > longest:
            return scaled, f"the model's {rope.rope_type} rotary scaling by {rope.factor:g}"
        return longest, "the model's max_position_embeddings"

    def without_padding(self, num_tokens: int | None) -> Self:
        """This configuration without the embedding's rows after those of the tokens, so that none is sampled."""
        if num_tokens is None or self.is_encoder or not 0 < num_tokens < self.vocab_size:
            return self
        return replace(self, vocab_size=num_tokens, num_padding_tokens=self.vocab_size - num_tokens)

    def check(self, path: Path) -> Self:
        """This configuration, if its sizes fit together; else CheckpointError naming `path`."""
        (supported,) = (declared.default for declared in fields(self) if declared.name == "hidden_act")
        if self.hidden_act != supported:
            raise CheckpointError(f"{path}: activation {self.hidden_act!r} is not supported; {supported} is.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"{path}: {self.num_attention_heads} attention heads can't share "
                f"{self.num_key_value_heads} key-value heads evenly."
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise CheckpointError(f"{path}: the size of a head, {self.head_dim}, is not even: it can't be rotated.")
        return self


Families = Mapping[str, type[ModelConfig]]
"""The configuration's class by Hugging Face's model_type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies. Names and shapes are Hugging Face's: a matrix is [out_features, in_features]."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """F32, F16, BF16, or a GGUF block type such as Q4_1; stored row by row."""
    path: Path
    offset: int
    """Of the first byte in the file."""
    num_bytes: int
    rope_interleaved_heads: int = 0
    """Non-zero: rows of each of this many heads are ordered for interleaved rotary pairs (GGUF's Llama), so that
    the loader must reorder them to Hugging Face's halves."""

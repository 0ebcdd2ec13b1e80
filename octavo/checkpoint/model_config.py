"""ModelConfig and TensorInfo: what a checkpoint says of itself, in Hugging Face's words, whatever its file format.

Pure data. Readers (`folder`, `gguf`) fill these in; models and the planner read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from octavo.core.kv_groups import KVGroup, group_layers
from octavo.errors import CheckpointError

__all__ = ["MAX_LAYERS", "ModelConfig", "PoolingConfig", "PoolingMode", "RopeConfig", "TensorInfo"]

MAX_LAYERS = 10_000
"""More than any model has: a damaged count must not become that many objects."""


ACTIVATIONS = {"bert": "gelu", "gemma3_text": "gelu_pytorch_tanh"}
"""By model type, where it is not silu."""


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
    """Hyperparameters of a transformer: a decoder, or an encoder. Field names are Hugging Face's."""

    model_type: str
    """Hugging Face's model_type; names the file in `octavo/models`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    is_encoder: bool = False
    """Attention goes in both directions: a text is computed whole, and gives hidden states, no next token."""
    rms_norm_eps: float = 1e-6
    layer_norm_eps: float = 1e-12
    type_vocab_size: int = 0
    """Kinds of segments that BERT has an embedding for; a text is of the first."""
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on the query, key and value projections (Qwen2 always has it)."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """One entry a layer: the number of latest positions a token attends to, itself included; None for all."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    """Of layers with a sliding window, where theirs differs (Gemma 3)."""
    attention_scale: float | None = None
    """What scores are multiplied by, if not head_dim ** -0.5."""
    rms_norm_offset: float = 0.0
    """Added to the stored weights of norms: Gemma's are about 0 in Hugging Face's files."""
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

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers by the block table that they share; none in an encoder."""
        if self.is_encoder:
            return ()
        return group_layers(self.sliding_windows or (None,) * self.num_hidden_layers)

    def check(self, path: Path) -> Self:
        """This configuration, if its sizes fit together; else CheckpointError naming `path`."""
        supported = ACTIVATIONS.get(self.model_type, "silu")
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

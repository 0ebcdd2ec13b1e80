"""The protocol of a device: all that the rest of octavo asks of what it computes on. A device is a folder beside this
file.

What is said here of *host* values is Python's: lists, numbers, numpy arrays. *Tensors* are the device's own, in its
memory, and only its ops and its own code look into them. Steps come one after the other, from one thread at a time.

A step passes through the parts below in this order. The runner changes `StepBuffers` by what the scheduler announced
and calls `fill`; `Sampler.prepare` writes down how each row of logits is drawn; `Forward.run` computes the model, its
inputs being where `fill` put them; `Sampler.drawn` or `Sampler.sample` returns the tokens, having stored them in the
buffers, where the next `fill` finds them. Only that last call waits for the device, so it is where a step's time is
spent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from msgspec import Struct

from octavo.core.step import NewRequest, ScheduledRequest, TokenLogprobs, TokenMask
from octavo.kernels.ops import Ops
from octavo.kernels.quantized import QuantizedForm
from octavo.kernels.sampling import NOT_FINITE, NOTHING_LEFT

__all__ = [
    "FAILURES",
    "CopyResult",
    "Device",
    "Draw",
    "Forward",
    "KVLayout",
    "KVPool",
    "ModelCalls",
    "SampledTokens",
    "Sampler",
    "StepBuffers",
    "StepRoom",
    "StepSize",
    "StepTensors",
]

FAILURES = {
    NOT_FINITE: "The model's logits are not finite: the computation overflowed or the weights are damaged.",
    NOTHING_LEFT: (
        "No token is left to sample: structured output, allowed_token_ids, bad_words, logit_bias and min_tokens rule "
        "out all of them."
    ),
}
"""By status of a draw: what a request that it fails is told."""
Draw = Literal["no", "any", "most_likely"]
"""What `Forward.run` does once it has the logits: nothing, draw from each row, or take each row's most likely token."""


# ---- memory


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV caches that a model needs, all of one shape, and the tier behind them."""

    num_caches: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of the stored keys and values; of int8 and float8_e4m3fn each row has a scale beside it."""
    num_tier_blocks: int = 0
    """Blocks of the tier, 0 for no tier. Their ids follow the pool's."""
    tier_folder: str = ""
    """Where a tier that is a file lies."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    failed: list[int]
    """Indices of the copies that could not be done."""
    seconds: float
    """How long those between pool and tier took."""


class KVPool(Protocol):
    """The memory of keys and values: a cache tensor for each place in a group of layers, and the tier behind it."""

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        """`num_caches` tensors of `Ops.kv_cache_shape`, over the blocks of pool and tier. Their blocks begin as
        zeros."""
        ...

    def copy(self, copies: Sequence[tuple[int, int]]) -> CopyResult:
        """Copy blocks (source, destination) in all caches, in this order, before anything else that is asked for later.

        Copies between pool and tier come first. One that fails must not end the engine: its index is returned.
        """
        ...

    def measure_copy_rate(self) -> float:
        """Bytes a second that are copied to the tier and back; any positive number where there is no tier.

        Raises ConfigError for a tier that can't be written to.
        """
        ...


# ---- a step's inputs


@dataclass(frozen=True, slots=True)
class StepRoom:
    """What a step, and a request, may grow to."""

    num_tokens: int
    num_requests: int
    num_logits: int
    """Rows of logits of all requests together."""
    max_model_len: int
    """Tokens of a request, the one that is sampled last not counted."""
    block_size: int
    num_groups: int
    """Groups of layers that have a block table each; 0 for a model without a cache."""
    vocab_size: int


class StepSize(Struct, frozen=True, gc=False):
    """How much of the room a step takes."""

    num_tokens: int
    num_requests: int
    num_logits: int


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's inputs as the model reads them: T tokens of R requests, and S rows of logits. All are contiguous."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    slot_mappings: tuple[torch.Tensor, ...]  # one a group: [T] int32, block · block_size + offset of each token
    block_tables: tuple[torch.Tensor, ...]  # one a group: [R, B] int32; what lies behind a request's blocks is not read
    query_start: torch.Tensor  # [R + 1] int32: each request's first token among the T, and at the end T
    seq_lens: torch.Tensor  # [R] int32: tokens of each request in the cache after this step
    logits_rows: torch.Tensor  # [S] int32: which of the T tokens each row of logits is of
    draws: torch.Tensor  # [S, DRAW_BYTES] uint8: kernels.sampling.SAMPLE_ROW of each row of logits
    masks: torch.Tensor  # [S, ceil(vocab_size / 8)] uint8: the allowed tokens of those rows that are masked


class StepBuffers(Protocol):
    """What a device keeps of each request between steps, in numbered rows, and the inputs of one step.

    A row holds the tokens of a request and, for each group of layers, its block table. Rows of finished requests are
    used again. Invariant: memory is committed for what was written, not for the longest context that is allowed.
    """

    @property
    def num_rows(self) -> int: ...

    def grow(self) -> None:
        """Make more rows; what is written stays."""
        ...

    def write_tokens(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        """The row's tokens from `position` on; whatever was there is overwritten."""
        ...

    def clear_blocks(self, row: int) -> None:
        """The row's tables are empty."""
        ...

    def append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Add to the row's tables: a list for each group, all of one length."""
        ...

    def fill(self, rows: list[int], entries: list[ScheduledRequest]) -> StepSize:
        """Make the inputs of a step, whose i-th entry is of the request in the i-th of `rows`.

        An entry's tokens are those of its row from `first_position` on. Its rows of logits are those of its last
        tokens, so with several of them all but the first belong to drafts. An entry without tokens has one row of
        logits: of the last token of the entry before. Each row of logits gets its position: that of the token it
        predicts.

        Raises IndexError for what there is no room for.
        """
        ...

    def tensors(self, size: StepSize) -> StepTensors:
        """The inputs of a step of this size, valid until `fill` is called again. For a step of the most that there is
        room for, they are where the inputs of every step are."""
        ...


# ---- the model


class ModelCalls(Protocol):
    """A model as a device calls it: only through the device's ops and views, so that calls can be captured."""

    @property
    def has_logits(self) -> bool:
        """Whether a step ends in logits; if not, only `hidden_states` is called."""
        ...

    def hidden_states(self, inputs: StepTensors) -> torch.Tensor:
        """[T, H] in the activations' dtype."""
        ...

    def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor, inputs: StepTensors) -> torch.Tensor:
        """Logits [S, V] float32 of the tokens `rows` [S] int32 of these hidden states."""
        ...

    def most_likely(self, hidden_states: torch.Tensor, inputs: StepTensors) -> None:
        """Fill in `inputs.draws` by the logits of `inputs.logits_rows`, which need not be stored: all rows have
        temperature 0 and no mask."""
        ...


class Forward(Protocol):
    """A model made ready for steps. What a method returns holds until it is called again, and may be written over."""

    def run(self, size: StepSize, draw: Draw = "no") -> None:
        """Compute the step that was filled in: its hidden states and, of a decoder, either the rows of logits or, if
        `draw` says how, the tokens drawn from them."""
        ...

    def hidden_states(self) -> torch.Tensor:
        """[T, H] of the last step."""
        ...

    def sampled_logits(self) -> torch.Tensor:
        """[S, V] that `run` has computed, if it drew nothing."""
        ...

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [B, V] of others, with these indices among the last step's tokens; 64 of them at most."""
        ...


# ---- sampling


class SampledTokens(Struct, frozen=True, gc=False):
    """What a step has drawn: an entry for each request that has rows of logits, in the step's order."""

    token_ids: list[list[int]]
    """Accepted tokens, at least one: the drafts that were drawn themselves, and the token after them."""
    logprobs: list[list[TokenLogprobs] | None]
    """One entry an accepted token, of requests that asked for them."""
    failed: dict[int, str]
    """By index among these requests: why a row of logits that counts has no token. Their tokens mean nothing."""


class Sampler(Protocol):
    """Draws tokens for requests with different parameters, under the row numbers of the buffers.

    Each row of logits is computed from that row alone, with noise that is a function of (seed, choice, position). Order
    of the steps: mask, allowed tokens, bad words, bias, min_tokens, penalties, temperature, min_p, top_k, top_p.
    Where a request has several rows of logits, each but the last is compared with the draft that follows it, and the
    longest run of equal ones is accepted with the token after it: so drafts change no bit of the result. Row j sees the
    j drafts before it as output; what is kept from step to step follows accepted tokens alone.
    """

    def add(self, row: int, request: NewRequest) -> None:
        """A request whose rows of logits will be drawn as its parameters say."""
        ...

    def remove(self, row: int) -> None:
        """Forget a request; also one that was never added."""
        ...

    def prepare(self, rows: list[int], num_logits: list[int]) -> Draw:
        """Before `run`, after `fill`: write how each row of logits is drawn into the step's draws, all but their
        positions. `rows` are those of the requests that have rows of logits; `num_logits` says how many.

        Returns what `run` may do by itself, if nothing else is to be done with these logits.
        """
        ...

    def drawn(self) -> SampledTokens:
        """Wait for the tokens that `run` has drawn, and store those accepted in the rows of the buffers."""
        ...

    def sample(self, logits: torch.Tensor, masks: Mapping[int, Sequence[TokenMask]]) -> SampledTokens:
        """Draw from logits [S, V], which are overwritten, and go on as `drawn` does.

        masks: by index among the requests that were prepared, one for each of their rows of logits.
        """
        ...

    def logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of each row of logits [B, V] with its token, and those of the `num_top` likeliest; NaN
        where a row is not finite."""
        ...


# ---- the device


class Device(Protocol):
    """Ops, facts and the parts of a step. There is one a process, and it holds nothing of any request itself."""

    @property
    def name(self) -> str:
        """In logs and in the engine's description."""
        ...

    @property
    def remark(self) -> str:
        """What the start says of this device beside its name, if it has a drawback; else empty."""
        ...

    @property
    def ops(self) -> Ops:
        """The ops of `kernels/ops.py` over the device's tensors, and how it lays out weights and caches."""
        ...

    # Facts

    def set_num_threads(self, num_threads: int) -> None:
        """How many CPU threads compute, where any do. Two pools that compute at once slow each other down several
        times, so a device with threads of its own holds torch to one."""
        ...

    def free_memory_bytes(self) -> int:
        """What can still be allocated for weights and caches."""
        ...

    def flops_per_s(
        self, hidden_size: int, dtype: torch.dtype, form: QuantizedForm | None, int8_activations: bool
    ) -> float:
        """Measured rate of arithmetic of `Ops.linear` on many rows, over a matrix of this form or, without one,
        dtype."""
        ...

    def read_bytes_per_s(self, tensors: Sequence[torch.Tensor]) -> float | None:
        """Measured rate at which these tensors are read; None where that can't be told."""
        ...

    def progress(self) -> int:
        """A number that changes while the device computes. Any thread may ask at any time."""
        ...

    # Parts of a step

    def make_kv_pool(self, layout: KVLayout) -> KVPool:
        """Allocate the caches and open the tier. Raises ConfigError for what can't be had."""
        ...

    def make_step_buffers(self, room: StepRoom) -> StepBuffers: ...

    def make_sampler(self, vocab_size: int, buffers: StepBuffers) -> Sampler:
        """`buffers` are of this device, and their draws are what the sampler writes to."""
        ...

    def capture(self, model: ModelCalls, buffers: StepBuffers, kv_pool: KVPool | None, eager: bool) -> Forward:
        """Make a model ready for steps whose inputs lie in `buffers`: captured, so that Python's cost does not grow
        with its layers, or called op by op in each step if `eager` is true. Both give the same bits."""
        ...

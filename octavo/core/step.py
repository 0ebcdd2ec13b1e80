"""The plain data of one step: what the scheduler asks for, what the runner gives back.

Ints, lists and tuples only, small enough to send to another process each step. The runner keeps each request's tokens
and appends what it samples, so a decode step carries no token at all.
"""

from typing import Literal, Protocol

from msgspec import Struct, field

from octavo.sampling_params import SamplingParams

__all__ = [
    "Executor",
    "FinishReason",
    "ModelRunnerOutput",
    "NewRequest",
    "RequestDelta",
    "SchedulerOutput",
    "StepHandle",
    "TokenLogprobs",
    "TokenMask",
    "TokenMasks",
]

FinishReason = Literal["stop", "length", "abort", "error"]
TokenMask = bytes | memoryview
"""Bit t % 8 of byte t // 8 says whether token t is allowed; at least a bit for each token of the vocabulary. It holds
until what was sampled under it is accepted."""


class NewRequest(Struct, frozen=True, gc=False):
    """What the runner must know of a request the first time it is scheduled."""

    request_id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """64-bit key of the request's sampling noise: drawn by the engine where `sampling_params.seed` is None."""
    choice: int = 0
    """Which of the prompt's `n` completions: part of the noise's counter beside the position."""
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence and stop tokens, kept from being sampled before `min_tokens`."""
    num_candidates: int = 0
    """Of a beam: how many most likely tokens are reported at each position, for others to choose from."""


class SchedulerOutput(Struct, frozen=True, gc=False):
    """One step's work. The lists named in the first group have one entry a scheduled request, in batch order."""

    step_id: int
    request_ids: list[int]
    num_computed_tokens: list[int]
    """Tokens whose KV is in the cache before this step: the position of the first scheduled token."""
    num_scheduled_tokens: list[int]
    """None of a request that forks: it samples from the last token of the entry before it."""
    new_block_ids: list[tuple[list[int], ...]]
    """Block ids to append to the request's table, one list a KV-cache group."""
    samples: list[bool]
    """Whether the step reaches the request's last token, so that a next one is sampled."""

    new_requests: list[NewRequest] = field(default_factory=list)
    """Requests scheduled for the first time; each is also in `request_ids`."""
    reset_request_ids: list[int] = field(default_factory=list)
    """Scheduled requests whose table starts anew (resumed after preemption, or a shared block was copied): clear it,
    then append."""
    finished_request_ids: list[int] = field(default_factory=list)
    """Requests to forget, before anything else in this step is done."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy, in order, before the step writes anything: (source, destination). Ids from `num_blocks` on are
    the tier's; copies within the pool come last. A step may have copies and no requests."""
    given_tokens: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """Tokens that the runner did not sample itself: (request id, position, the request's tokens from there on)."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to submit."""
        return not self.request_ids and not self.copies

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)


class TokenLogprobs(Struct, frozen=True, gc=False):
    """Natural-log probabilities at one position, from the raw logits: before temperature, penalties and filters."""

    logprob: float
    """Of the token that is there: sampled, or the prompt's."""
    rank: int
    """Of that token among all, 1 for the most likely."""
    top: list[tuple[int, float]]
    """(token id, logprob), most likely first; as many as the request asked for."""


class ModelRunnerOutput(Struct, frozen=True, gc=False):
    """What one step sampled. Lists have one entry for each request of the step whose `samples` was true, in order."""

    request_ids: list[int]
    sampled_token_ids: list[list[int]]
    """Accepted tokens, in order; one token unless drafts were verified."""
    logprobs: list[list[TokenLogprobs] | None]
    """One entry a token for requests that asked for them."""
    failed: dict[int, str] = field(default_factory=dict)
    """Requests of the step whose computation failed (a NaN in their logits), with the reason; absent above."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By request, the next of its prompt's tokens in order, the first token left out; no token comes twice."""
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """Of requests that are pooled instead of sampled, little-endian float32; absent above."""
    failed_copies: list[int] = field(default_factory=list)
    """Indices into the step's `copies` of those that could not be done; their destinations hold nothing of use."""
    copy_s: float = 0.0
    """How long the copies took."""
    compute_s: float = 0.0
    """How long the rest of the step took; 0 where nobody measures."""


class TokenMasks(Protocol):
    """The late inputs of a step: which tokens structured output allows, computed while the device works."""

    @property
    def are_wanted(self) -> bool:
        """Whether any request of the engine is constrained."""
        ...

    def wait(self, request_ids: list[int]) -> tuple[dict[int, TokenMask], dict[int, str]]:
        """The masks of those requests that are constrained, and why a mask could not be had."""
        ...

    def accept(self, request_ids: list[int], token_ids: list[int]) -> None:
        """What was sampled under those masks. Returns at once; the next masks are then under way."""
        ...


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step; raises what the step raised."""
        ...


class Executor(Protocol):
    """Where steps are computed. Steps complete in the order in which they were submitted."""

    def submit(self, scheduler_output: SchedulerOutput) -> StepHandle: ...


class RequestDelta(Struct, frozen=True, gc=False):
    """What one step adds to a request, as it leaves the engine. The last one carries a `finish_reason`."""

    request_id: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry a new token, for requests that asked for them."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token that ended the request, when it is not the model's own end-of-sequence token."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache, at first admission."""
    error: str | None = None
    """Why the request failed, when `finish_reason` is "error"."""
    is_invalid: bool = False
    """Whether the request itself is to blame for that."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the next tokens of the prompt, for requests that asked for them; all come before, or with, the first new
    token."""
    embedding: bytes | None = None
    """The prompt's, little-endian float32: the one result of a request that is pooled instead of sampled."""
    score: float | None = None
    """Of a beam that ended: by what beams are ranked."""

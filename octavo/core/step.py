"""The plain data of one step: what the scheduler asks for, what the runner gives back.

Ints, lists and tuples only, small enough to send to another process each step. The runner keeps each request's tokens
and appends what it samples, so a decode step carries no token at all.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol

from msgspec import Struct, field

from octavo.sampling_params import SamplingParams

__all__ = [
    "NO_MASKS",
    "Executor",
    "Fault",
    "FinishReason",
    "GivenTokens",
    "ModelRunnerOutput",
    "NewRequest",
    "RequestDelta",
    "ScheduledRequest",
    "SchedulerOutput",
    "StepHandle",
    "TokenLogprobs",
    "TokenMask",
    "TokenMasks",
]

FinishReason = Literal["stop", "length", "abort", "error"]
TokenMask = bytes | memoryview
"""Bit t % 8 of byte t // 8 says whether token t is allowed; at least a bit for each token of the vocabulary. Its
memory holds until the step that it is for has returned."""
TokenMasks = Mapping[int, Sequence[TokenMask]]
"""By request, a mask for each of its rows of logits; none for a request that is over, whose tokens are dropped."""
NO_MASKS: TokenMasks = MappingProxyType({})


class NewRequest(Struct, frozen=True, gc=False):
    """What the runner must know of a request the first time it is scheduled."""

    request_id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """64-bit key of the request's sampling noise: drawn by the engine where `sampling_params.seed` is None."""
    choice: int = 0
    """Which of the prompt's `n` completions: part of the noise's counter beside the position."""
    stop_token_ids: frozenset[int] = frozenset()
    """End-of-sequence and stop tokens, kept from being sampled before `min_tokens`."""
    num_candidates: int = 0
    """Of a beam: how many most likely tokens are reported at each position, for others to choose from."""


class ScheduledRequest(Struct, frozen=True, gc=False):
    """One request's part of a step."""

    request_id: int
    first_position: int
    """Tokens whose KV is in the cache before this step: the position of the first scheduled token."""
    num_tokens: int
    """Tokens to compute. 0 for a request that forks: it samples from the last token of the entry before it."""
    num_logits: int
    """Rows of logits to sample from, those of the last tokens: 0, 1, or 1 more than there are drafts among them."""
    new_block_ids: tuple[list[int], ...]
    """Block ids to append to the request's table, one list a KV-cache group."""


class GivenTokens(Struct, frozen=True, gc=False):
    """Tokens of a request for a receiver that cannot know them: those that stand from `position` on."""

    request_id: int
    position: int
    token_ids: list[int]


class SchedulerOutput(Struct, frozen=True, gc=False):
    """One step's work, made by a `StepBuilder`. Nobody changes it or its lists.

    A receiver forgets, takes in new requests, resets tables, takes given tokens and does the copies, in this order, and
    then computes the entries.
    """

    step_id: int
    entries: list[ScheduledRequest]
    """In batch order, at most one a request."""
    new_requests: list[NewRequest] = field(default_factory=list)
    """Requests scheduled for the first time; each also has an entry."""
    reset_request_ids: list[int] = field(default_factory=list)
    """Scheduled requests whose table starts anew (resumed after preemption, or a shared block was copied): clear it,
    then append."""
    forgotten_request_ids: list[int] = field(default_factory=list)
    """Requests that are over."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy, in order, before the step writes anything: (source, destination). Ids from `num_blocks` on are
    the tier's; copies within the pool come last. A step may have copies and no entries."""
    given_tokens: list[GivenTokens] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to submit."""
        return not self.entries and not self.copies

    @property
    def request_ids(self) -> list[int]:
        return [entry.request_id for entry in self.entries]

    @property
    def num_tokens(self) -> int:
        return sum([entry.num_tokens for entry in self.entries])


class TokenLogprobs(Struct, frozen=True, gc=False):
    """Natural-log probabilities at one position, from the raw logits: before temperature, penalties and filters."""

    logprob: float
    """Of the token that is there: sampled, or the prompt's."""
    rank: int
    """Of that token among all, 1 for the most likely."""
    top: list[tuple[int, float]]
    """(token id, logprob), most likely first; as many as the request asked for."""


class ModelRunnerOutput(Struct, frozen=True, gc=False):
    """What one step sampled. Lists have one entry for each request of the step that has rows of logits, in order."""

    request_ids: list[int]
    sampled_token_ids: list[list[int]]
    """Accepted tokens, in order; one token unless drafts were verified."""
    logprobs: list[list[TokenLogprobs] | None]
    """One entry a token for requests that asked for them."""
    failed: dict[int, str] = field(default_factory=dict)
    """Requests of the step whose computation failed (a NaN in their logits), with the reason; absent above."""
    unsatisfiable: list[int] = field(default_factory=list)
    """Those of them whose own constraints leave no token to sample."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By request, the next of its prompt's tokens in order, the first token left out; no token comes twice."""
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """Of requests that are pooled instead of sampled, little-endian float32, the last its length before it was brought
    to 1; absent above."""
    failed_copies: list[int] = field(default_factory=list)
    """Indices into the step's `copies` of those that could not be done; their destinations hold nothing of use."""
    copy_s: float = 0.0
    """How long the copies took."""
    compute_s: float = 0.0
    """How long the rest of the step took; 0 where nobody measures."""


class StepHandle(Protocol):
    """A step in flight."""

    def result(self, masks: TokenMasks = NO_MASKS) -> ModelRunnerOutput:
        """Wait for the step; raises what the step raised. Called once, with masks for each request of the step that has
        rows of logits and whose sampling parameters ask for structured output."""
        ...


class Executor(Protocol):
    """Where steps are computed. Steps complete in the order in which they were submitted.

    Sampling is a step's second phase: one that samples for structured output waits for its masks there, and the steps
    after it wait too. Every other step is computed to its end whether or not its result is asked for.
    """

    def submit(self, scheduler_output: SchedulerOutput) -> StepHandle: ...


class Fault(Struct, frozen=True, gc=False):
    param: str | None = None
    """The field that is to blame, as far as the engine knows."""
    code: str | None = None
    """What kind of fault it is, in the API's words."""


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
    fault: Fault | None = None
    """What is wrong with the request itself, if that is the reason."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the next tokens of the prompt, for requests that asked for them; all come before, or with, the first new
    token."""
    embedding: bytes | None = None
    """The prompt's, little-endian float32, the last its length before it was brought to 1: the one result of a request
    that is pooled instead of sampled."""
    score: float | None = None
    """Of a beam that ended: by what beams are ranked."""

    @property
    def is_invalid(self) -> bool:
        """Whether the request itself is to blame for its error."""
        return self.fault is not None

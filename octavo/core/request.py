"""Request: one sequence's ledger from arrival to finish, and the limits a new one is checked against.

Knows token counts and its own end; knows nothing of blocks, text or time.
"""

from dataclasses import dataclass

from octavo.core.step import FinishReason, TokenLogprobs
from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.sampling_params import SamplingParams

__all__ = ["Request", "RequestLimits"]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the model and the pool can hold: checked by the API process before queueing, and by the engine."""

    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    kv_capacity_tokens: int
    """Tokens that the KV pool and its tier hold."""

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise InvalidRequestError or ContextLengthError for a request that can never be served."""
        num_prompt_tokens = len(prompt_token_ids)
        self._check_tokens(prompt_token_ids, "prompt")
        params.check_vocabulary(self.vocab_size)
        asked = 1 if params.max_tokens is None else params.max_tokens
        request = f"The request has {num_prompt_tokens} tokens in the prompt and asks for {asked} more"
        total = num_prompt_tokens + asked
        num_kv_tokens = max(total - 1, num_prompt_tokens)  # the last sampled token is never computed
        if total > self.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens. {request}, {total} together. "
                "Shorten the prompt or lower max_tokens; the server's limit is set by --max-model-len."
            )
        if num_kv_tokens > self.kv_capacity_tokens:
            raise ContextLengthError(
                f"The server's KV cache holds {self.kv_capacity_tokens} tokens. {request}, which needs room for "
                f"{num_kv_tokens}. Shorten the prompt or lower max_tokens; the server's limit is set by "
                "--kv-cache-memory-bytes or --gpu-memory-utilization, and may be raised by --swap-space."
            )

    def check_input(self, token_ids: list[int]) -> None:
        """The same for a text that is to be embedded: nothing is generated."""
        self._check_tokens(token_ids, "input")
        most = min(self.max_model_len, self.kv_capacity_tokens)
        if len(token_ids) > most:
            limit = "--max-model-len" if most == self.max_model_len else "--kv-cache-memory-bytes"
            raise ContextLengthError(
                f"This model's maximum context length is {most} tokens. The input has {len(token_ids)} tokens. Shorten "
                f"it, or have it cut off with truncate_prompt_tokens; the server's limit is set by {limit}.",
                param="input",
            )

    def _check_tokens(self, token_ids: list[int], name: str) -> None:
        if not token_ids:
            raise InvalidRequestError(f"The {name} is empty: it must hold at least one token.", param=name)
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.vocab_size:
            value = lowest if lowest < 0 else highest
            raise InvalidRequestError(
                f"Token id {value} in the {name} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}.",
                param=name,
            )

    def max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """The most tokens this request may generate."""
        room = min(self.max_model_len, self.kv_capacity_tokens + 1) - num_prompt_tokens
        return room if params.max_tokens is None else min(params.max_tokens, room)


class Request:
    """One sequence's token ledger.

    `token_ids` holds the known tokens: the prompt, then the accepted output. Steps in flight sample tokens whose value
    is not known yet; `num_placeholders` counts them, and `num_tokens` counts both kinds. With a `max_tokens` of 0 the
    prompt is computed to its end all the same, and the one token that is sampled there is not accepted.

    Invariants: num_computed_tokens <= num_tokens <= num_prompt_tokens + max(max_tokens, 1); there are no more
    placeholders than steps in flight; the token that reaches max_tokens is never computed. Only the scheduler writes
    here.
    """

    __slots__ = (
        "awaits_token",
        "block_hashes",
        "cache_salt",
        "choice",
        "eos_token_ids",
        "finish_reason",
        "followers",
        "forked_from",
        "given_from",
        "leader",
        "max_tokens",
        "most_computed_tokens",
        "num_cached_tokens",
        "num_candidates",
        "num_computed_tokens",
        "num_placeholders",
        "num_prompt_tokens",
        "num_shared_tokens",
        "num_steps_in_flight",
        "num_tier_cached_tokens",
        "predicted_tokens",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "seed",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
        "urgency",
        "waits_for_grammar",
        "was_scheduled",
    )

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        eos_token_ids: frozenset[int],
        seed: int,
        choice: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        num_candidates: int = 0,
    ) -> None:
        """`max_tokens`: as `RequestLimits.max_tokens` resolved it. `stop_token_ids` need not repeat `eos_token_ids`:
        they are added here or, with `ignore_eos`, taken away unless the request itself names them. Structured output
        always ends with one. With `num_candidates` the request is a beam: no token is accepted that it samples, it is
        given one after the other.
        """
        assert prompt_token_ids
        assert max_tokens >= 0
        if sampling_params.ignore_eos and sampling_params.structured_outputs is None:
            stop_token_ids -= eos_token_ids.difference(sampling_params.stop_token_ids)
        else:
            stop_token_ids |= eos_token_ids
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.choice = choice
        self.priority = priority
        self.cache_salt = cache_salt

        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.most_computed_tokens = self.num_prompt_tokens + max(max_tokens, 1) - 1
        self.num_placeholders = 0
        self.num_computed_tokens = 0
        self.num_steps_in_flight = 0
        self.urgency = (0, 0)
        """What requests are ordered by, the least first: level and arrival, set by the scheduler when it is queued."""
        self.predicted_tokens = 0
        """How many output tokens were expected of it when it was first admitted."""
        self.num_candidates = num_candidates
        self.waits_for_grammar = False
        self.awaits_token = False
        """Whether it is a beam whose candidates were reported."""
        self.given_from: int | None = None
        """Position from which on the runner does not know the tokens."""
        self.leader: Request | None = None
        """The request with the same prompt that computes it for this one too, until that is done."""
        self.followers: list[Request] = []
        """The requests that this one leads."""
        self.forked_from: Request | None = None
        """The leader, until what was sampled where this one began is accepted."""
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        """Of a leader, what was reported of the prompt, for those that follow."""
        self.was_scheduled = False
        self.num_cached_tokens = 0
        self.num_tier_cached_tokens = 0
        self.num_shared_tokens = 0
        """Tokens whose blocks were others' when it was admitted first or forked last."""
        self.block_hashes: list[bytes] = []
        """Chained hashes of the full blocks of known tokens, extended by the KV cache manager when it needs them."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it may be scheduled."""
        if self.waits_for_grammar or self.awaits_token or self.leader is not None:
            return False
        return not any(follower.waits_for_grammar for follower in self.followers)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def gap(self) -> int:
        """Tokens left to compute."""
        return self.num_kv_tokens - self.num_computed_tokens

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose keys and values are needed: all but the one that reaches `max_tokens`."""
        num_tokens, most = len(self.token_ids) + self.num_placeholders, self.most_computed_tokens
        return num_tokens if num_tokens < most else most

    @property
    def skips_prefix_cache(self) -> bool:
        """Its own blocks can be shared, but none are taken from the cache: every position must be computed."""
        return self.sampling_params.prompt_logprobs is not None

    def append(self, token_id: int) -> FinishReason | None:
        """Add an accepted token. Returns why it ends the request, None when it does not."""
        self.token_ids.append(token_id)
        num_output_tokens = len(self.token_ids) - self.num_prompt_tokens
        if token_id in self.stop_token_ids and num_output_tokens >= self.sampling_params.min_tokens:
            self.stop_reason = self.stop_reason_of(token_id)
            return "stop"
        return "length" if num_output_tokens >= self.max_tokens else None

    def stop_reason_of(self, token_id: int) -> int | None:
        """What is reported of a token that ended the request: None for the model's own end of sequence."""
        is_own_eos = token_id in self.eos_token_ids and not self.sampling_params.ignore_eos
        return None if is_own_eos else token_id

    def give(self, token_ids: list[int]) -> None:
        """Of a beam: replace its tokens by these, one more of them, so that the last one can be computed."""
        old, first = self.token_ids, self.num_prompt_tokens
        num_same = next((i for i in range(first, len(old)) if old[i] != token_ids[i]), len(old))
        self.given_from = num_same if self.given_from is None else min(self.given_from, num_same)
        self.token_ids = token_ids
        self.most_computed_tokens = len(token_ids)
        self.awaits_token = False

    def truncate(self, num_output_tokens: int) -> int:
        """Forget output past this many tokens. Returns how many were forgotten."""
        num_forgotten = max(0, self.num_output_tokens - num_output_tokens)
        if num_forgotten:
            del self.token_ids[-num_forgotten:]
        return num_forgotten

    def check(self) -> None:
        assert 0 <= self.num_computed_tokens <= self.num_tokens
        assert 0 <= self.num_placeholders <= self.num_steps_in_flight
        assert self.num_tokens <= self.most_computed_tokens + 1
        assert self.token_ids[: self.num_prompt_tokens] == self.prompt_token_ids
        assert self.num_cached_tokens < self.num_prompt_tokens
        assert not self.was_scheduled or not (self.waits_for_grammar or self.leader)
        assert all(follower.leader is self for follower in self.followers)

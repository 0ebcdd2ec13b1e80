"""Request: one sequence's ledger from arrival to finish, and the limits a new one is checked against.

Knows token counts and its own end; knows nothing of blocks, text or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.step import FinishReason
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
        self.check_all([prompt_token_ids], params)

    def check_all(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """The same for several prompts with the same parameters, which are looked at once."""
        params.check_vocabulary(self.vocab_size)
        for prompt_token_ids in prompts:
            self._check_prompt(prompt_token_ids, params)

    def _check_prompt(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        num_prompt_tokens = len(prompt_token_ids)
        self._check_tokens(prompt_token_ids, "prompt")
        asked = 1 if params.max_tokens is None else params.max_tokens
        request = f"The request has {num_prompt_tokens} tokens in the prompt and asks for {asked} more"
        total = num_prompt_tokens + asked
        num_kv_tokens = max(total - 1, num_prompt_tokens)  # the last sampled token is never computed
        if total > self.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens. {request}, {total} together. "
                "Shorten the prompt or lower max_tokens",
                limit="model",
            )
        if num_kv_tokens > self.kv_capacity_tokens:
            raise ContextLengthError(
                f"The server's KV cache holds {self.kv_capacity_tokens} tokens. {request}, which needs room for "
                f"{num_kv_tokens}. Shorten the prompt or lower max_tokens",
                limit="kv_cache",
            )

    def check_input(self, token_ids: list[int]) -> None:
        """The same for a text that is to be embedded: nothing is generated."""
        self._check_tokens(token_ids, "input")
        most = min(self.max_model_len, self.kv_capacity_tokens)
        if len(token_ids) > most:
            raise ContextLengthError(
                f"This model's maximum context length is {most} tokens. The input has {len(token_ids)} tokens. Shorten "
                "it, or have it cut off with truncate_prompt_tokens",
                limit="model" if most == self.max_model_len else "kv_cache_of_inputs",
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

    `token_ids` holds the known tokens: the prompt, then the accepted output. Behind them come the drafts, which are
    guesses, or else the placeholders: tokens that steps in flight sample, and that can be scheduled although their
    values are not known. With a `max_tokens` of 0 the prompt is computed to its end all the same, and the one token
    that is sampled there is not accepted.

        [ prompt                 | output            | drafts or placeholders ]     num_tokens
        [ computed, or in a step in flight                 | gap              ]     num_computed_tokens

    A step that verifies drafts has counted them as computed. What it does not accept is taken back when it returns;
    until then the request is in no later step, since its next position is not known.

    Invariants: num_computed_tokens <= num_tokens <= num_prompt_tokens + max(max_tokens, 1); there are no more
    placeholders than steps in flight, and none beside drafts; the token that reaches max_tokens is never computed. Only
    the scheduler and its parts write here.
    """

    __slots__ = (
        "cache_salt",
        "choice",
        "draft_token_ids",
        "eos_token_ids",
        "finish_reason",
        "max_tokens",
        "num_computed_tokens",
        "num_placeholders",
        "num_steps_in_flight",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "seed",
        "stop_token_ids",
        "token_ids",
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
    ) -> None:
        """`max_tokens`: as `RequestLimits.max_tokens` resolved it. `stop_token_ids` need not repeat `eos_token_ids`:
        they are added here or, with `ignore_eos`, taken away unless the request itself names them. Structured output
        always ends with one.
        """
        assert prompt_token_ids
        assert max_tokens >= 0
        if sampling_params.ignore_eos and sampling_params.structured_outputs is None:
            if not eos_token_ids.isdisjoint(stop_token_ids):
                stop_token_ids -= eos_token_ids.difference(sampling_params.stop_token_ids)
        elif not eos_token_ids <= stop_token_ids:  # else the set, which may be large, is not copied
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
        self.draft_token_ids: list[int] = []
        self.num_placeholders = 0
        self.num_computed_tokens = 0
        self.num_steps_in_flight = 0
        """Steps that compute its tokens or copy its blocks."""
        self.finish_reason: FinishReason | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + len(self.draft_token_ids) + self.num_placeholders

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def most_computed_tokens(self) -> int:
        """Tokens that can ever be computed: all but the one that reaches `max_tokens`."""
        return len(self.prompt_token_ids) + (self.max_tokens or 1) - 1

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose keys and values are needed now."""
        return min(self.num_tokens, self.most_computed_tokens)

    @property
    def gap(self) -> int:
        """Tokens left to compute."""
        num_tokens = len(self.token_ids) + len(self.draft_token_ids) + self.num_placeholders
        most = len(self.prompt_token_ids) + (self.max_tokens or 1) - 1
        return (num_tokens if num_tokens < most else most) - self.num_computed_tokens

    @property
    def skips_prefix_cache(self) -> bool:
        """Its own blocks can be shared, but none are taken from the cache: every position must be computed."""
        return self.sampling_params.prompt_logprobs is not None

    @property
    def stop_reason(self) -> int | None:
        """The last token, if it is one to stop at and not the model's own end of sequence."""
        token_id = self.token_ids[-1]
        is_own_eos = token_id in self.eos_token_ids and not self.sampling_params.ignore_eos
        return token_id if token_id in self.stop_token_ids and not is_own_eos else None

    def append(self, token_id: int) -> FinishReason | None:
        """Add an accepted token. Returns why it ends the request, None when it does not."""
        self.token_ids.append(token_id)
        num_output_tokens = len(self.token_ids) - len(self.prompt_token_ids)
        if token_id in self.stop_token_ids and num_output_tokens >= self.sampling_params.min_tokens:
            return "stop"
        return "length" if num_output_tokens >= self.max_tokens else None

    def truncate(self, num_output_tokens: int) -> int:
        """Forget output past this many tokens. Returns how many were forgotten."""
        num_forgotten = max(0, self.num_output_tokens - num_output_tokens)
        if num_forgotten:
            del self.token_ids[-num_forgotten:]
        return num_forgotten

    def check(self) -> None:
        assert 0 <= self.num_computed_tokens <= self.num_tokens
        assert 0 <= self.num_placeholders <= self.num_steps_in_flight
        assert not (self.num_placeholders and self.draft_token_ids)
        assert self.num_tokens <= self.most_computed_tokens + 1
        assert self.token_ids[: self.num_prompt_tokens] == self.prompt_token_ids

"""Request: one sequence's ledger from arrival to finish, and the limits a new one is checked against.

Knows token counts and its own end; knows nothing of blocks, text or time.
"""

from dataclasses import dataclass

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.sampling_params import SamplingParams

__all__ = ["RequestLimits"]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the model and the pool can hold: checked by the API process before a request is queued, and by the engine."""

    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    kv_capacity_tokens: int
    """Tokens the whole KV pool holds."""

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise InvalidRequestError or ContextLengthError for a request that can never be served."""
        num_prompt_tokens = len(prompt_token_ids)
        if not num_prompt_tokens:
            raise InvalidRequestError("The prompt is empty: it must hold at least one token.", param="prompt")
        lowest, highest = min(prompt_token_ids), max(prompt_token_ids)
        if lowest < 0 or highest >= self.vocab_size:
            value = lowest if lowest < 0 else highest
            raise InvalidRequestError(
                f"Token id {value} in the prompt is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}.",
                param="prompt",
            )
        params.check_vocabulary(self.vocab_size)
        asked = 1 if params.max_tokens is None else params.max_tokens
        self._check_length(num_prompt_tokens, asked, self.max_model_len, "maximum context length", "--max-model-len")
        # The last sampled token is never computed, so it needs no KV.
        self._check_length(
            num_prompt_tokens,
            asked,
            self.kv_capacity_tokens + 1,
            "KV cache's capacity",
            "--kv-cache-memory-bytes or --gpu-memory-utilization",
        )

    def _check_length(self, num_prompt_tokens: int, asked: int, limit: int, what: str, option: str) -> None:
        if num_prompt_tokens + asked <= limit:
            return
        raise ContextLengthError(
            f"This model's {what} is {limit} tokens. The request has {num_prompt_tokens} tokens in the prompt and asks "
            f"for {asked} more, {num_prompt_tokens + asked} together. Shorten the prompt or lower max_tokens; the "
            f"server's limit is set by {option}."
        )

    def max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """The most tokens this request may generate."""
        room = min(self.max_model_len, self.kv_capacity_tokens + 1) - num_prompt_tokens
        return room if params.max_tokens is None else min(params.max_tokens, room)

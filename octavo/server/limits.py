"""Limits: what one request may ask of the model and of the server."""

from dataclasses import dataclass, replace
from typing import Literal

from octavo.errors import InvalidRequestError
from octavo.ipc.messages import EngineInfo
from octavo.sampling_params import SamplingParams

__all__ = ["Limits"]

MAX_TOKENS = 1_000_000
"""Tokens of all prompts of a request together, unless the context alone is longer."""


@dataclass(frozen=True, slots=True)
class Limits:
    info: EngineInfo
    max_request_choices: int

    @property
    def max_model_len(self) -> int:
        return self.info.limits.max_model_len

    @property
    def _own_max_tokens(self) -> int | None:
        """What the model recommends."""
        own = self.info.config.runtime.sampling_defaults.get("max_tokens")
        return None if own is None else int(own)

    def check_inputs(self, inputs: list[list[int]]) -> None:
        """The same for texts that are to be embedded."""
        for token_ids in inputs:
            self.info.limits.check_input(token_ids)
        _check_total(inputs, self.max_model_len, "input")

    def check_num_choices(self, num_prompts: int, n: int) -> None:
        """Raises InvalidRequestError for more completions than one request may ask for."""
        if num_prompts * n > self.max_request_choices:
            raise InvalidRequestError(
                f"{num_prompts} prompts times n = {n} are more than the {self.max_request_choices} choices that one "
                "request may have; --max-request-choices sets the limit.",
                param="prompt" if num_prompts > n else "n",
            )

    def check_vocabulary(self, token_ids: list[int], param: str) -> None:
        """Raises InvalidRequestError for an id that stands for no token."""
        size = self.info.limits.vocab_size
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= size:
            raise InvalidRequestError(
                f"Token id {lowest if lowest < 0 else highest} is outside the vocabulary: ids go from 0 to {size - 1}.",
                param=param,
            )

    def with_max_tokens(self, params: SamplingParams, prompts: list[list[int]], is_asked: bool) -> SamplingParams:
        """`params` with a limit on the tokens to generate. One that the request does not ask for (`is_asked`), but the
        model or the API sets, shrinks to what there is room for.

        Raises InvalidRequestError or ContextLengthError for prompts that can never be answered.
        """
        limits = self.info.limits
        room = limits.max_tokens(max(map(len, prompts)), replace(params, min_tokens=0, max_tokens=None))
        if params.min_tokens > max(room, 1):
            raise InvalidRequestError(
                f"min_tokens must be at most {room}, which is what the context has left after the prompt, got "
                f"{params.min_tokens}.",
                param="min_tokens",
            )
        if not is_asked:
            most = self._own_max_tokens if params.max_tokens is None else params.max_tokens
            if most is not None:
                params = replace(params, max_tokens=max(min(most, room), params.min_tokens, 1))
        limits.check_all(prompts, params)
        _check_total(prompts, limits.max_model_len, "prompt")
        return params

    def most_tokens(self, num_kept: int | None) -> int | None:
        """Of a prompt that is not to be cut; None for others."""
        return self.max_model_len if num_kept is None else None

    def truncated(
        self, token_ids: list[int], num_kept: int | None, side: Literal["left", "right"] | None, params: SamplingParams
    ) -> list[int]:
        """A prompt without what is cut off on one side; -1 keeps as many tokens as leave room for the answer.

        Raises InvalidRequestError where more are to be kept than the context has.
        """
        if num_kept is None:
            return token_ids
        if num_kept > self.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or from 1 to {self.max_model_len}, the model's limit, got "
                f"{num_kept}.",
                param="truncate_prompt_tokens",
            )
        if num_kept == -1:
            num_kept = max(self.max_model_len - (1 if params.max_tokens is None else params.max_tokens), 1)
        return token_ids[:num_kept] if side == "right" else token_ids[-num_kept:]


def _check_total(prompts: list[list[int]], max_model_len: int, param: str) -> None:
    num_tokens, most = sum(map(len, prompts)), max(MAX_TOKENS, max_model_len)
    if num_tokens > most:
        raise InvalidRequestError(
            f"The {param}s have {num_tokens} tokens together; one request may have {most}. Send several requests.",
            param=param,
        )

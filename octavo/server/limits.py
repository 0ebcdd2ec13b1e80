"""Limits: what one request may ask of the model and of the server."""

from dataclasses import dataclass, replace

from octavo.errors import InvalidRequestError
from octavo.ipc.messages import EngineInfo
from octavo.sampling_params import SamplingParams

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    info: EngineInfo
    max_request_choices: int

    def check(self, prompts: list[list[int]], params: SamplingParams) -> None:
        """Raises InvalidRequestError or ContextLengthError for prompts that can never be answered."""
        for prompt in prompts:
            self.info.limits.check(prompt, params)

    def check_inputs(self, inputs: list[list[int]]) -> None:
        """The same for texts that are to be embedded."""
        for token_ids in inputs:
            self.info.limits.check_input(token_ids)

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
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise InvalidRequestError(
                    f"Token id {token_id} is outside the vocabulary: ids go from 0 to {size - 1}.",
                    param=param,
                )

    def with_max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Where a request sets no limit the model's own counts, as far as there is room."""
        own = self.info.config.runtime.sampling_defaults.get("max_tokens")
        if params.max_tokens is not None or own is None:
            return params
        room = self.info.limits.max_tokens(num_prompt_tokens, params)
        return replace(params, max_tokens=max(min(int(own), room), 1))

    def truncated(self, token_ids: list[int], num_kept: int | None, params: SamplingParams) -> list[int]:
        """The last tokens of a prompt; -1: as many as leave room for the answer."""
        if num_kept == -1:
            num_kept = max(self.info.limits.max_model_len - (1 if params.max_tokens is None else params.max_tokens), 1)
        return token_ids if num_kept is None else token_ids[-num_kept:]

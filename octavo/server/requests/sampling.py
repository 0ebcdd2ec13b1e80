"""SamplingRequest: the fields that chat and plain completions share, and how they become `SamplingParams`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from octavo.errors import InvalidRequestError
from octavo.sampling_params import BeamSearchOptions, SamplingParams
from octavo.server.requests.fields import ApiRequest, Fields
from octavo.server.requests.numbers import Int, WireInt
from octavo.server.requests.structure import StructureFields

__all__ = ["SamplingRequest", "StreamOptions"]


class StreamOptions(Fields):
    include_usage: bool | None = None
    """Send a last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk (vLLM), unless `include_usage` is false."""


class SamplingRequest(StructureFields, ApiRequest):
    """What chat and plain completions share. None stands for the default, as an absent field does."""

    n: Int | None = None
    min_tokens: WireInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: WireInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int | None = None
    logprob_token_ids: list[Int] | None = None
    """With `logprobs`: of these tokens, in place of the most likely ones."""
    truncate_prompt_tokens: Int | None = None
    """Keep this many tokens of the prompt; -1: as many as there is room for."""
    truncation_side: Literal["left", "right"] | None = None
    """Which side is cut off; None is "left", which keeps the prompt's end."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Write tokens in log-probabilities as "token_id:5"."""
    best_of: Int | None = None
    use_beam_search: bool | None = None
    """Return the `n` best outputs that as many beams find."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: WireInt | None = None
    cache_salt: str | None = None

    def make_params(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
        """`defaults`: the model's, for fields that are not set. Raises InvalidRequestError naming the field that is out
        of range."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                f"best_of must equal n ({self.n or 1}), got {self.best_of}: octavo returns every completion it makes.",
                param="best_of",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream: true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs is only allowed without stream: true.", param="prompt_logprobs")
        if self.cache_salt == "":
            raise InvalidRequestError("cache_salt must be a string that is not empty, or null.", param="cache_salt")
        length = self.truncate_prompt_tokens
        if length is not None and length != -1 and length < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be an integer of at least 1, or -1, got {length}.",
                param="truncate_prompt_tokens",
            )
        given = {name: value for name in SHARED_FIELDS if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        own["structured_outputs"] = self.structure()
        own["beam_search"] = self._beam_search()
        if own["beam_search"] is not None:
            defaults = {}  # they are about sampling
        return SamplingParams(**({name: defaults[name] for name in defaults if name != "max_tokens"} | given | own))

    def _beam_search(self) -> BeamSearchOptions | None:
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        if self.use_beam_search:
            if (field := self.structure_field) is not None:
                raise InvalidRequestError(f"{field} is not supported with beam search.", param=field)
            return BeamSearchOptions(length_penalty=penalty, early_stopping=self.early_stopping or False)
        for name, asks in (("length_penalty", penalty != 1.0), ("early_stopping", bool(self.early_stopping))):
            if asks:
                raise InvalidRequestError(f"{name} is only allowed with use_beam_search: true.", param=name)
        return None

    def warnings(self) -> list[str]:
        older = self.guided_fields()
        return [f"{', '.join(older)}: deprecated in favour of structured_outputs"] if older else []


COMPUTED_FIELDS = {"logit_bias", "structured_outputs", "beam_search"}
SHARED_FIELDS = SamplingRequest.model_fields.keys() & {field.name for field in fields(SamplingParams)} - COMPUTED_FIELDS


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise InvalidRequestError(
            f"logit_bias must be keyed by token ids, got {key[:50]!a}.", param="logit_bias"
        ) from None

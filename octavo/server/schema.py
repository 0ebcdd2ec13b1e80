"""The requests' fields: types here, ranges in `SamplingParams`. What octavo can't do yet is refused by name.

Knows no model: limits of the vocabulary and the context are checked later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octavo.errors import InvalidRequestError
from octavo.sampling_params import BeamSearchOptions, SamplingParams
from octavo.server.structure import StructureFields
from octavo.server.tool_choice import ToolChoice, choose
from octavo.server.tool_schema import MessageCall, NamedToolChoice, Tool, arguments_for_template

__all__ = [
    "ApiRequest",
    "ChatCompletionRequest",
    "ChatInput",
    "CompletionRequest",
    "ContentPart",
    "DetokenizeRequest",
    "Message",
    "SamplingRequest",
    "StreamOptions",
    "TokenizeRequest",
]

WireInt = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
"""An integer whose range is checked elsewhere, but that must fit a message to the engine."""

HARMLESS = frozenset(
    [
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "verbosity",
    ]
)
"""Fields that clients send and that change nothing in what octavo answers."""

UNSUPPORTED = {
    "audio": "audio output",
    "function_call": "function calls",
    "functions": "function calls",
    "kv_transfer_params": "moving KV between engines",
    "logits_processors": "logits processors of a request's own",
    "modalities": "output other than text",
    "prediction": "predicted outputs",
    "prompt_embeds": "prompts given as embeddings",
    "suffix": "filling in before a suffix",
    "web_search_options": "web search",
}
"""Fields that would change the answer, and what they ask for."""

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "modalities": [["text"]],
}
"""Values of these fields that ask for nothing, beside null, false and empty ones."""


class ApiRequest(BaseModel):
    """No coercion: "5" is no number. Unknown fields are kept, so that they can be named."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    user: str | None = None

    def unknown_fields(self) -> list[str]:
        """Fields that mean nothing here. Raises InvalidRequestError for one that octavo knows but can't serve."""
        extra = self.model_extra or {}
        for name, value in extra.items():
            wish = UNSUPPORTED.get(name)
            asks = value is not None and value is not False and value not in ("", [], {})
            if wish is not None and asks and value not in NEUTRAL.get(name, ()):
                raise InvalidRequestError(
                    f"{name} is not supported: octavo can't do {wish} yet. Leave the field out.", param=name
                )
        return [name for name in extra if name not in UNSUPPORTED and name not in HARMLESS]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    """Send a last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk (vLLM)."""


class SamplingRequest(StructureFields, ApiRequest):
    """What chat and plain completions share. None stands for the default, as an absent field does."""

    n: int | None = None
    min_tokens: WireInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: WireInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens at the prompt's end; -1: as many as there is room for."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Write tokens in log-probabilities as "token_id:5"."""
    best_of: int | None = None
    use_beam_search: bool | None = None
    """Return the `n` best outputs that as many beams find."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: WireInt | None = None
    cache_salt: str | None = None

    def _params(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
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

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


COMPUTED_FIELDS = {"logit_bias", "structured_outputs", "beam_search"}
SHARED_FIELDS = SamplingRequest.model_fields.keys() & {field.name for field in fields(SamplingParams)} - COMPUTED_FIELDS


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise InvalidRequestError(
            f"logit_bias must be keyed by token ids, got {key[:50]!a}.", param="logit_bias"
        ) from None


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class Message(BaseModel):
    """Fields beside these reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    """Of a message with the role "tool": the call it answers."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same, as templates know it."""

    @property
    def text(self) -> str:
        """The content's parts joined."""
        return (
            "".join(part.text or "" for part in self.content) if isinstance(self.content, list) else self.content or ""
        )

    @property
    def num_characters(self) -> int:
        return len(self.text) + sum(len(call.function.arguments or "") for call in self.tool_calls or ())

    def for_template(self, where: str) -> dict[str, Any]:
        """Raises InvalidRequestError naming `where` the arguments of a call are no JSON object."""
        message = self.model_dump(exclude_unset=True)
        for i, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            place = f"{where}.tool_calls[{i}].function.arguments"
            function["arguments"] = arguments_for_template(function.get("arguments"), place)
        if (reasoning := self.reasoning_content or self.reasoning) is not None:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return message


class ChatInput(ApiRequest):
    """Messages and how they become a prompt. Parts of other types than text are refused here: a template might drop
    them in silence."""

    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    """Instead of the model's own, where the server allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    def check_parts(self) -> None:
        """Raises InvalidRequestError for an image or another part that octavo can't read."""
        for i, message in enumerate(self.messages or ()):
            for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if part.type != "text" or part.text is None:
                    raise InvalidRequestError(
                        f"messages[{i}].content[{j}] must be of type 'text' and have a text, got {part.type[:50]!a}: "
                        "octavo reads text alone.",
                        param="messages",
                    )

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """None without any: that is what templates look for."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()] or None

    @property
    def num_characters(self) -> int:
        return sum(message.num_characters for message in self.messages or ()) + (
            len(repr(self.tools)) if self.tools else 0
        )


class ChatCompletionRequest(ChatInput, SamplingRequest):
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Goes before max_tokens, which OpenAI has retired."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    """Begin the answer with the last message, if that is the assistant's."""
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    """None is "auto"."""
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """A model that shall call none is shown none."""
        return None if self.tool_choice == "none" else super().template_tools

    def chosen_tools(self) -> ToolChoice:
        """Raises InvalidRequestError for tools, or a choice among them, that can't be."""
        return choose(self.tools, self.tool_choice, self.parallel_tool_calls is not False)

    @property
    def echoed(self) -> str:
        last = self.messages[-1] if self.messages else None
        return last.text if self.echo and last is not None and last.role == "assistant" else ""

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if max_tokens == 0:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise InvalidRequestError(f"{name} must be an integer of at least 1, got 0.", param=name)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._params(defaults, max_tokens=max_tokens, logprobs=logprobs)


class CompletionRequest(SamplingRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be an integer of at least 1, got 0. With echo: true it can be 0.", param="max_tokens"
            )
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise InvalidRequestError("echo with logprobs is not supported with beam search.", param="echo")
        params = self._params(defaults, max_tokens=self.max_tokens, logprobs=self.logprobs)
        if self.echo and self.logprobs is not None:
            return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))
        return params


class TokenizeRequest(ChatInput):
    """A prompt, or messages as for a chat completion."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiRequest):
    tokens: list[int]

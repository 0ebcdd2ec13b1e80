"""ServedModel: what the handlers need of the model that is being served. Prompts to token ids, engine to generations.

Long texts are tokenised in a thread, so that running streams do not wait for them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from octavo.api.engine_client import EngineClient
from octavo.core.request import RequestLimits
from octavo.errors import ConfigError, InvalidRequestError
from octavo.ipc.messages import EngineInfo
from octavo.sampling_params import SamplingParams
from octavo.server.grammar_check import GrammarChecker
from octavo.server.reading import Reading, plan_reading
from octavo.server.schema import ChatCompletionRequest, ChatInput
from octavo.server.tool_choice import ToolChoice
from octavo.text.chat_template import ChatTemplate
from octavo.text.reasoning import ReasoningFormat
from octavo.text.text_side import TextSide
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_calls import ToolFormat

__all__ = ["Prompt", "ServedModel"]

T = TypeVar("T")
LONG_TEXT = 8192
"""Characters: several milliseconds of tokenising."""
LONGEST_TAG = 32
"""Tokens, at the end of a prompt, that a tag and white space can take."""


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None
    """As it was sent; None for one that was sent as token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    root: str
    """The --model value."""
    text: TextSide
    client: EngineClient
    info: EngineInfo
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    trusts_request_template: bool = False
    grammars: GrammarChecker | None = None
    """Refuses structured output that the engine would refuse."""
    is_strict: bool = False
    """Refuses fields that nobody knows."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(
            vocab_size=self.info.vocab_size,
            max_model_len=self.info.max_model_len,
            kv_capacity_tokens=self.info.kv_capacity_tokens,
        )

    def check_generates(self) -> None:
        """Raises InvalidRequestError for a model that only embeds."""
        if self.info.pooling is not None:
            raise InvalidRequestError(
                f"{self.name!r} embeds texts, it does not generate (--runner pooling). Send them to /v1/embeddings.",
                param="model",
            )

    async def chat_prompt(self, request: ChatInput) -> list[int]:
        """Raises InvalidRequestError for messages that the template refuses."""
        request.check_parts()
        template = self._template(request)

        def render_and_encode() -> list[int]:
            text = template.render(
                [message.for_template(f"messages[{i}]") for i, message in enumerate(request.messages or ())],
                request.add_generation_prompt is not False,
                request.template_tools,
                request.documents or None,
                continue_final_message=bool(request.continue_final_message),
                **_template_variables(request),
            )
            return self.tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))

        is_slow = request.chat_template is not None  # or may be
        return await _run(render_and_encode, LONG_TEXT if is_slow else request.num_characters)

    def _template(self, request: ChatInput) -> ChatTemplate:
        if request.chat_template is None:
            return self.text.chat_template
        if not self.trusts_request_template:
            raise InvalidRequestError(
                "chat_template is refused: a template is a program that can run for long. The server's operator can "
                "allow it with --trust-request-chat-template.",
                param="chat_template",
            )
        try:
            return ChatTemplate(request.chat_template, self.tokenizer.special_tokens)
        except ConfigError as error:
            raise InvalidRequestError(str(error), param="chat_template") from error

    async def complete(self, params: SamplingParams) -> SamplingParams:
        """The parameters with what only a tokenizer can fill in."""
        num_characters = sum(map(len, params.bad_words))
        return await _run(lambda: params.with_bad_words_encoded(self._encode_plain), num_characters)

    async def check_structure(self, params: SamplingParams, param: str | None) -> None:
        """Raises InvalidRequestError for structured output, asked for by the field `param`, that can't be compiled."""
        if self.grammars is None or params.structured_outputs is None:
            return
        if problem := await self.grammars.problem(params.structured_outputs):
            raise InvalidRequestError(problem, param=param)

    def _encode_plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def with_max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Where a request sets no limit the model's own counts, as far as there is room."""
        own = self.info.sampling_defaults.get("max_tokens")
        if params.max_tokens is not None or own is None:
            return params
        room = self.limits.max_tokens(num_prompt_tokens, params)
        return replace(params, max_tokens=max(min(int(own), room), 1))

    def truncated(self, token_ids: list[int], num_kept: int | None, params: SamplingParams) -> list[int]:
        """The last tokens of a prompt; -1: as many as leave room for the answer."""
        if num_kept == -1:
            num_kept = max(self.info.max_model_len - (1 if params.max_tokens is None else params.max_tokens), 1)
        return token_ids if num_kept is None else token_ids[-num_kept:]

    def reading(self, request: ChatCompletionRequest, choice: ToolChoice, prompt: list[int], is_free: bool) -> Reading:
        """How to read the answers; one that a grammar rules is not `is_free` and has no reasoning."""
        form = self.reasoning_format if is_free else None
        is_open = False
        if form is not None and request.continue_final_message:
            is_open = form.is_open_after(request.messages[-1].text)
        elif form is not None:
            is_open = form.is_opened_by(self.decode(prompt[-LONGEST_TAG:]))
        return plan_reading(
            choice,
            self.tool_format,
            form,
            is_reasoning_open=is_open,
            keeps_reasoning=request.include_reasoning is not False,
        )

    async def text_prompt(self, text: str, add_special_tokens: bool = True) -> Prompt:
        token_ids = await _run(lambda: self.tokenizer.encode(text, add_special_tokens), len(text))
        return Prompt(token_ids, text)

    def echo(self, prompt: Prompt) -> str:
        return self.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def _template_variables(request: ChatInput) -> dict[str, Any]:
    variables = request.chat_template_kwargs or {}
    taken = {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents", "self"}
    if clash := taken & variables.keys():
        raise InvalidRequestError(
            f"chat_template_kwargs can't set {min(clash)}: it has a field of its own.", param="chat_template_kwargs"
        )
    return variables


async def _run(work: Callable[[], T], num_characters: int) -> T:
    return work() if num_characters < LONG_TEXT else await asyncio.to_thread(work)

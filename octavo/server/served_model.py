"""ServedModel: what the handlers need of the model that is being served. Prompts to token ids, engine to generations.

Long texts are tokenised in a thread, so that running streams do not wait for them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.core.request import RequestLimits
from octavo.engine.client import EngineClient
from octavo.engine.messages import EngineInfo
from octavo.errors import InvalidRequestError
from octavo.server.reading import Reading, plan_reading
from octavo.server.schema import ChatCompletionRequest, ChatInput
from octavo.server.tool_choice import ToolChoice
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

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(
            vocab_size=self.info.vocab_size,
            max_model_len=self.info.max_model_len,
            kv_capacity_tokens=self.info.num_blocks * self.info.block_size,
        )

    async def chat_prompt(self, request: ChatInput) -> list[int]:
        """Raises InvalidRequestError for messages that the template refuses."""
        request.check_parts()

        def render_and_encode() -> list[int]:
            text = self.text.chat_template.render(
                [message.for_template(f"messages[{i}]") for i, message in enumerate(request.messages or ())],
                request.add_generation_prompt is not False,
                request.template_tools,
                continue_final_message=bool(request.continue_final_message),
                **_template_variables(request),
            )
            return self.tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))

        return await _run(render_and_encode, request.num_characters)

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

"""PromptMaker: what a request sends as texts or messages, as token ids.

Long texts are tokenised in a thread, so that running streams do not wait for them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.errors import ConfigError, InvalidRequestError
from octavo.sampling_params import SamplingParams
from octavo.server.requests.messages import ChatInput
from octavo.text.chat_template import ChatTemplate
from octavo.text.text_side import TextSide
from octavo.text.tokenizer import Tokenizer

__all__ = ["LONG_TEXT", "Prompt", "PromptMaker"]

T = TypeVar("T")
LONG_TEXT = 8192
"""Characters that take several milliseconds to tokenise."""


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None
    """As it was sent; None for one that was sent as token ids."""


@dataclass(frozen=True, slots=True)
class PromptMaker:
    text: TextSide
    trusts_request_template: bool = False

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    async def of_messages(self, request: ChatInput, size: int) -> list[int]:
        """`size`: bytes of the body that the request came in, a bound on what the template has to go through.

        Raises InvalidRequestError for messages that the template refuses.
        """
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
        return await _run(render_and_encode, LONG_TEXT if is_slow else size)

    async def of_text(self, text: str, add_special_tokens: bool = True) -> Prompt:
        token_ids = await _run(lambda: self.tokenizer.encode(text, add_special_tokens), len(text))
        return Prompt(token_ids, text)

    async def of_inputs(
        self, inputs: list[str | list[int]], add_special_tokens: bool, most: int | None
    ) -> list[list[int]]:
        """Texts or token ids that are to be embedded, each cut after its first `most` tokens."""

        def encode(text: str | list[int]) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens, most) if isinstance(text, str) else text[:most]

        num_characters = sum(len(text) for text in inputs if isinstance(text, str))
        return await _run(lambda: list(map(encode, inputs)), num_characters)

    async def with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """`params` with the token ids of its bad words."""
        num_characters = sum(map(len, params.bad_words))
        return await _run(
            lambda: params.with_bad_words_encoded(lambda word: self.tokenizer.encode(word, add_special_tokens=False)),
            num_characters,
        )

    def shown(self, prompt: Prompt) -> str:
        """The prompt's text, as an echo repeats it."""
        return self.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

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

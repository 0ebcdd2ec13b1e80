"""PromptMaker: what a request sends as texts or messages, as token ids.

Long texts are tokenised in a thread, so that running streams do not wait for them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from octavo.errors import ConfigError, ContextLengthError, InvalidRequestError
from octavo.sampling_params import SamplingParams
from octavo.server.requests.messages import ChatInput
from octavo.text.chat_template import ChatTemplate
from octavo.text.text_side import TextSide
from octavo.text.tokenizer import Tokenizer

__all__ = ["LONG_TEXT", "Prompt", "PromptMaker"]

T = TypeVar("T")
LONG_TEXT = 8192
"""Characters that take several milliseconds to tokenise."""


ORDINARY_ROLES = frozenset(["system", "user", "assistant"])
MAX_TRIED_ROLES = 4
"""Each costs two renderings of a short chat."""
LONGEST_ROLE = 64


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

    async def of_messages(self, request: ChatInput, size: int, most: int | None = None) -> list[int]:
        """`size`: bytes of the body that the request came in, a bound on what the template has to go through.

        Raises InvalidRequestError for messages that the template refuses, and for more than `most` tokens, if that is
        certain without counting.
        """
        request.check_parts()
        template = self.template_of(request)

        def render_and_encode() -> list[int]:
            text = template.render(
                [message.for_template() for message in request.messages or ()],
                request.add_generation_prompt is not False,
                request.template_tools,
                request.documents or None,
                continue_final_message=bool(request.continue_final_message),
                **request.template_variables,
            )
            self._check_length(text, most)
            try:
                return self.tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))
            except InvalidRequestError as error:  # a lone surrogate in JSON within JSON, which is only read here
                raise InvalidRequestError(error.message, param="messages") from None

        is_slow = request.chat_template is not None  # or may be
        return await _run(render_and_encode, LONG_TEXT if is_slow else size)

    def dropped_roles(self, request: ChatInput) -> list[str]:
        """Roles whose messages the template leaves out in silence."""
        roles = {message.role for message in request.messages or ()} - ORDINARY_ROLES
        template = self.template_of(request)
        tried = [role for role in sorted(roles) if len(role) <= LONGEST_ROLE][:MAX_TRIED_ROLES]
        return [role for role in tried if not template.shows(role)]

    async def of_text(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> Prompt:
        """Raises ContextLengthError for more than `most` tokens, if that is certain without counting."""
        self._check_length(text, most)
        token_ids = await _run(lambda: self.tokenizer.encode(text, add_special_tokens), len(text))
        return Prompt(token_ids, text)

    async def of_inputs(
        self, inputs: list[str | list[int]], add_special_tokens: bool, most: int | None, keeps_end: bool = False
    ) -> list[list[int]]:
        """Texts or token ids that are to be embedded, of each of which `most` tokens are kept."""

        def encode(text: str | list[int]) -> list[int]:
            if isinstance(text, str) and not keeps_end:
                return self.tokenizer.encode(text, add_special_tokens, most)
            token_ids = self.tokenizer.encode(text, add_special_tokens) if isinstance(text, str) else text
            return token_ids if most is None else token_ids[-most:] if keeps_end else token_ids[:most]

        num_characters = sum(len(text) for text in inputs if isinstance(text, str))
        return await _run(lambda: list(map(encode, inputs)), num_characters)

    async def with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """`params` with the token ids of its bad words."""
        num_characters = sum(map(len, params.bad_words))
        return await _run(
            lambda: params.with_bad_words_encoded(lambda word: self.tokenizer.encode(word, add_special_tokens=False)),
            num_characters,
        )

    def _check_length(self, text: str, most: int | None) -> None:
        if most is not None and (fewest := self.tokenizer.fewest_tokens(text)) > most:
            raise ContextLengthError(
                f"This model's maximum context length is {most} tokens. The prompt has {len(text)} characters, which "
                f"are at least {fewest} tokens. Shorten it; the server's limit is set by --max-model-len."
            )

    def shown(self, prompt: Prompt) -> str:
        """The prompt's text, as an echo repeats it."""
        return self.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def template_of(self, request: ChatInput) -> ChatTemplate:
        """The model's chat template, or the request's own. Raises InvalidRequestError."""
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


async def _run(work: Callable[[], T], num_characters: int) -> T:
    return work() if num_characters < LONG_TEXT else await asyncio.to_thread(work)

"""Extras: what a request wants to see beside the text, which is log-probabilities and token ids."""

from dataclasses import dataclass
from typing import Self

from msgspec import UNSET, UnsetType

from octavo.api.choice import Piece
from octavo.sampling_params import SamplingParams
from octavo.server.requests.sampling import SamplingRequest
from octavo.server.text_out.logprobs import LogprobFormat
from octavo.server.text_out.shapes import ChatLogprobs, PromptLogprob
from octavo.text.tokenizer import Tokenizer

__all__ = ["Extras", "ShownPrompt"]


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt, as far as an answer shows it."""

    token_ids: list[int]
    echo: str | None = None
    """Its text, where that goes before what is generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    format: LogprobFormat
    num_logprobs: int | None = None
    """Most likely tokens beside each of the text's; None: no log-probabilities."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt, in vLLM's shape."""
    token_ids: bool = False

    @classmethod
    def of(cls, body: SamplingRequest, tokenizer: Tokenizer, params: SamplingParams) -> Self:
        return cls(
            format=LogprobFormat(tokenizer, params.skip_special_tokens, bool(body.return_tokens_as_token_ids)),
            num_logprobs=None if params.logprobs is None else len(params.logprob_token_ids) or params.logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
        )

    def ids(self, token_ids: list[int]) -> list[int] | None:
        return token_ids if self.token_ids else None

    def chunk_ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        """In chunks a field that nobody asked for is left out."""
        return token_ids if self.token_ids else UNSET

    def chat_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return self.format.chat(piece)

    def prompt_logprobs(self, prompt: ShownPrompt, piece: Piece) -> list[dict[int, PromptLogprob] | None] | None:
        if self.num_prompt_logprobs is None or piece.prompt_logprobs is None:
            return None
        return self.format.prompt(prompt.token_ids, piece.prompt_logprobs, self.num_prompt_logprobs)

    def is_news(self, piece: Piece) -> bool:
        """Whether a piece without text is worth a chunk."""
        return bool(piece.logprobs) or (self.token_ids and bool(piece.token_ids)) or piece.finish_reason is not None

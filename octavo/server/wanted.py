"""What a request wants to see beside the text: log-probabilities and token ids, of the answer and of the prompt."""

from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from octavo.api.choice import Piece
from octavo.server.logprobs import LogprobFormat
from octavo.server.responses import ChatLogprobs, PromptLogprob

__all__ = ["ShownPrompt", "Wanted"]


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt, as far as an answer shows it."""

    token_ids: list[int]
    echo: str | None = None
    """Its text, where that goes before what is generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    format: LogprobFormat
    num_logprobs: int | None = None
    """Most likely tokens beside each of the text's; None: no log-probabilities."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt, in vLLM's shape."""
    token_ids: bool = False

    def ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self.token_ids else UNSET

    def chat_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return self.format.chat(piece)

    def prompt_logprobs(self, prompt: ShownPrompt, piece: Piece) -> list[dict[int, PromptLogprob] | None] | UnsetType:
        if self.num_prompt_logprobs is None or piece.prompt_logprobs is None:
            return UNSET
        return self.format.prompt(prompt.token_ids, piece.prompt_logprobs, self.num_prompt_logprobs)

    def is_news(self, piece: Piece) -> bool:
        """Whether a piece without text is worth a chunk."""
        return bool(piece.logprobs) or (self.token_ids and bool(piece.token_ids)) or piece.finish_reason is not None

"""What the answers of both APIs share: the usage, log-probabilities, and the protocol of a format.

Shapes are OpenAI's, with vLLM's additions. msgspec encodes them, in a microsecond a chunk.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UnsetType

from octavo.api.choice import Piece

__all__ = [
    "ChatLogprob",
    "ChatLogprobs",
    "ChunkUsage",
    "Format",
    "PromptLogprob",
    "PromptTokensDetails",
    "TextLogprobs",
    "TopLogprob",
    "Usage",
]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's own, one for each token id."""

    logprob: float
    rank: int
    decoded_token: str


class TextLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


ChunkUsage = Usage | UnsetType | None


class Format(Protocol):
    """One request's way to write its answer. `usage` of a chunk: UNSET leaves the field out."""

    def opening(self, usage: ChunkUsage) -> list[msgspec.Struct]:
        """Chunks that go before all pieces."""
        ...

    def chunks(self, index: int, piece: Piece, usage: ChunkUsage) -> list[msgspec.Struct]:
        """None for a piece in which there is nothing to show."""
        ...

    def last(self, usage: Usage) -> msgspec.Struct:
        """The chunk with the usage and no choice."""
        ...

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        """The answer in one, from one merged piece a choice."""
        ...

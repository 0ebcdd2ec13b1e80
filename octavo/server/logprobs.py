"""Log-probabilities in the shapes of the two APIs: tokens as text and as their true bytes.

A special token that the text leaves out has no bytes, so that the bytes of all tokens joined are the text's.
"""

from octavo.core.step import TokenLogprobs
from octavo.engine.choice import Piece
from octavo.server.responses import ChatLogprob, ChatLogprobs, TextLogprobs, TopLogprob
from octavo.text.tokenizer import Tokenizer

__all__ = ["LogprobFormat"]

LOWEST = -9999.0
"""OpenAI's stand-in for the logarithm of zero, which JSON has no number for."""


class LogprobFormat:
    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def chat(self, piece: Piece) -> ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        entries = zip(piece.token_ids, piece.logprobs, strict=True)
        return ChatLogprobs([self._chat_entry(token_id, logprobs) for token_id, logprobs in entries])

    def _chat_entry(self, token_id: int, logprobs: TokenLogprobs) -> ChatLogprob:
        top = [TopLogprob(self._text(i), max(logprob, LOWEST), self._bytes(i)) for i, logprob in logprobs.top]
        return ChatLogprob(self._text(token_id), max(logprobs.logprob, LOWEST), self._bytes(token_id), top)

    def text(self, piece: Piece, offset: int) -> TextLogprobs | None:
        """`offset`: where the piece's first token begins in the text."""
        if piece.logprobs is None:
            return None
        result = TextLogprobs([], [], [], [])
        for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True):
            token = self._legacy_text(token_id)
            result.text_offset.append(offset)
            result.token_logprobs.append(max(logprobs.logprob, LOWEST))
            result.tokens.append(token)
            result.top_logprobs.append(self._top_dict(token_id, logprobs))
            offset += len(token)
        return result

    def _top_dict(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the chosen one; of tokens that read alike, the likelier."""
        top: dict[str, float] = {}
        for i, logprob in [*logprobs.top, (token_id, logprobs.logprob)]:
            top.setdefault(self._legacy_text(i), max(logprob, LOWEST))
        return top

    def _bytes(self, token_id: int) -> list[int]:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return []
        return list(self._tokenizer.token_bytes(token_id))

    def _text(self, token_id: int) -> str:
        """A token that is a part of a character is written in escapes: \\xf0\\x9f."""
        token = self._tokenizer.token_bytes(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in token)

    def _legacy_text(self, token_id: int) -> str:
        text = self._text(token_id)
        return f"bytes:{text}" if text.startswith("\\x") else text

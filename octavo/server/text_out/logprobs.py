"""Log-probabilities in the shapes of the two APIs: tokens as text and as their true bytes.

A special token that the text leaves out has no bytes, so that the bytes of all tokens joined are the text's.
"""

import codecs
from collections.abc import Iterable, Sequence

from octavo.api.choice import Piece
from octavo.core.step import TokenLogprobs
from octavo.server.text_out.shapes import ChatLogprob, ChatLogprobs, PromptLogprob, TextLogprobs, TopLogprob
from octavo.text.tokenizer import Tokenizer

__all__ = ["LogprobFormat", "TextCursor"]

LOWEST = -9999.0
"""OpenAI's stand-in for the logarithm of zero, which JSON has no number for."""


class TextCursor:
    """Where each token begins in one choice's text, in characters; a part of a character begins where that does."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, start: int = 0) -> None:
        """`start`: characters before the first generated one."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._position = start

    def offsets(self, token_ids: Iterable[int]) -> list[int]:
        """Of further generated tokens."""
        found = []
        for token_id in token_ids:
            found.append(self._position)
            if not (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
                self._position += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return found

    def prompt_offsets(self, token_ids: Iterable[int], prompt: str) -> list[int]:
        """Of a prompt's tokens in its text, which may lack the special tokens that were put around it, and the space
        that a SentencePiece vocabulary puts before it."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        found, position = [], 0
        for token_id in token_ids:
            found.append(position)
            text = decoder.decode(self._tokenizer.token_bytes(token_id))
            if prompt.startswith(text, position):
                position += len(text)
            elif not self._tokenizer.is_special(token_id):
                position = min(position + len(text.removeprefix(" ")), len(prompt))
        return found


class LogprobFormat:
    """`names_ids`: tokens are written as "token_id:5", for clients that can't tell texts apart."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, names_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._names_ids = names_ids

    def cursor(self, start: int) -> TextCursor:
        return TextCursor(self._tokenizer, self._skip_special_tokens, start)

    def chat(self, piece: Piece) -> ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        entries = zip(piece.token_ids, piece.logprobs, strict=True)
        return ChatLogprobs([self._chat_entry(token_id, logprobs) for token_id, logprobs in entries])

    def _chat_entry(self, token_id: int, logprobs: TokenLogprobs) -> ChatLogprob:
        top = [TopLogprob(self._text(i), max(logprob, LOWEST), self._bytes(i)) for i, logprob in logprobs.top]
        return ChatLogprob(self._text(token_id), max(logprobs.logprob, LOWEST), self._bytes(token_id), top)

    def text(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: list[int], num_top: int
    ) -> TextLogprobs:
        """None stands for the first token of a prompt, which nothing comes before."""
        entries = list(zip(token_ids, logprobs, strict=True))
        return TextLogprobs(
            text_offset=offsets,
            token_logprobs=[None if entry is None else max(entry.logprob, LOWEST) for _, entry in entries],
            tokens=[self._legacy_text(token_id) for token_id in token_ids],
            top_logprobs=[None if entry is None else self._top_dict(i, entry, num_top) for i, entry in entries],
        )

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
    ) -> list[dict[int, PromptLogprob] | None]:
        """vLLM's own shape, keyed by token id: the prompt's token, then the most likely. None for the first token."""
        return [None, *(self._prompt_entry(*pair, num_top) for pair in zip(token_ids[1:], logprobs, strict=True))]

    def _prompt_entry(self, token_id: int, logprobs: TokenLogprobs, num_top: int) -> dict[int, PromptLogprob]:
        entries = {token_id: self._prompt_token(token_id, logprobs.logprob, logprobs.rank)}
        for rank, (i, logprob) in enumerate(logprobs.top[:num_top], 1):
            entries.setdefault(i, self._prompt_token(i, logprob, rank))
        return entries

    def _prompt_token(self, token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(max(logprob, LOWEST), rank, self._tokenizer.token_text(token_id))

    def _top_dict(self, token_id: int, logprobs: TokenLogprobs, num_top: int) -> dict[str, float]:
        """The most likely tokens and the chosen one; of tokens that read alike, the likelier."""
        top: dict[str, float] = {}
        for i, logprob in [*logprobs.top[:num_top], (token_id, logprobs.logprob)]:
            top.setdefault(self._legacy_text(i), max(logprob, LOWEST))
        return top

    def _bytes(self, token_id: int) -> list[int]:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return []
        return list(self._tokenizer.token_bytes(token_id))

    def _text(self, token_id: int) -> str:
        """A token that is a part of a character is written in escapes: \\xf0\\x9f."""
        if self._names_ids:
            return f"token_id:{token_id}"
        token = self._tokenizer.token_bytes(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in token)

    def _legacy_text(self, token_id: int) -> str:
        text = self._text(token_id)
        return f"bytes:{text}" if text.startswith("\\x") else text

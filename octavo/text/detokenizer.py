"""Detokenizer: generated tokens to text that is safe to send, one instance a choice. Finds stop strings.

Knows bytes and characters only; what a stop means for the request is the caller's business.
"""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

__all__ = ["Detokenizer", "StopMatcher", "TokenBytes"]


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class StopAutomaton:
    """An Aho-Corasick automaton over the stop strings: each character costs amortised constant time.

    A state stands for the longest suffix of the text so far that begins a stop string. Many matchers share one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        """By state: how many characters of a stop string it stands for."""
        self.stop: list[str | None] = [None]
        """By state: the longest stop string that ends in it."""
        self._fallback = [0]  # the state of the longest proper suffix that also begins a stop string
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.stop.append(None)
                self._fallback.append(0)
            state = self._next[state][character]
        self.stop[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                self.stop[child] = self.stop[child] or self.stop[self._fallback[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)


_automaton = lru_cache(maxsize=16)(StopAutomaton)
"""All choices of a request have the same, and clients send the same stop strings again and again."""


class StopMatcher:
    """Where one text is among the stop strings."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = _automaton(stops)
        self._state = 0

    @property
    def num_held(self) -> int:
        """Length of the longest suffix of the text so far that begins a stop string."""
        return self._automaton.depth[self._state]

    def feed(self, text: str, may_stop: bool = True) -> tuple[str, int] | None:
        """The first stop string completed within `text` (the longest of those that end together) and where it ends.
        Those that may not stop are passed over, though their ends can begin another."""
        for position, character in enumerate(text, 1):
            self._state = self._automaton.step(self._state, character)
            stop = self._automaton.stop[self._state]
            if stop is not None and may_stop:
                return stop, position
        return None


class Detokenizer:
    """Text of one choice's generated tokens, in deltas that never have to be taken back.

    - The deltas joined are the UTF-8 decoding, with U+FFFD for what is not UTF-8, of the tokens' joined bytes, up to
      the stop string. How the tokens are split over calls changes neither text nor stop.
    - Held back until they are decided: the bytes of an unfinished character, and the longest suffix that begins a stop
      string.
    - The stop string completed first wins; of those that end together, the longest. After it, tokens are ignored.
      One that the first `min_tokens` tokens complete does not count.
    - A special token that is left out of the text ends it where a stop string is that token's text.
    - Of a SentencePiece vocabulary's tokens the leading space is kept: the text continues a prompt.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(tuple(stop))
        self._stops = frozenset(stop)
        self._held = ""
        self._sent: list[str] = []
        self._num_tokens = 0
        self._stopped_by: str | None = None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stopped_by

    @property
    def num_tokens(self) -> int:
        """Tokens that count: all so far, or up to and including the one that completed the stop string."""
        return self._num_tokens

    @property
    def text(self) -> str:
        """All deltas so far, joined."""
        self._sent = ["".join(self._sent)]
        return self._sent[0]

    def append(self, token_ids: Iterable[int]) -> str:
        """Take more tokens; return the text that can be sent now."""
        deltas = []
        for token_id in token_ids:
            if self._stopped_by is not None:
                break
            self._num_tokens += 1
            if not (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
                deltas.append(self._release(self._decoder.decode(self._tokenizer.token_bytes(token_id))))
            elif self._stops and self._num_tokens > self._min_tokens:
                deltas.append(self._stop_at(self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")))
        return self._send("".join(deltas))

    def _stop_at(self, hidden: str) -> str:
        """What a special token that is left out of the text makes safe to send: all of it, if its own is a stop."""
        if hidden not in self._stops:
            return ""
        rest = self._release(self._decoder.decode(b"", final=True))
        if self._stopped_by is None:
            rest, self._held, self._stopped_by = rest + self._held, "", hidden
            rest += hidden if self._include_stop else ""
        return rest

    def finish(self) -> str:
        """Nothing follows: return all that was held back. An unfinished character becomes U+FFFD."""
        if self._stopped_by is not None:
            return ""
        delta = self._release(self._decoder.decode(b"", final=True))
        delta, self._held = delta + self._held, ""
        return self._send(delta)

    def _release(self, new: str) -> str:
        """What `new` text makes safe to send; ends the text when it completes a stop string."""
        found = self._matcher.feed(new, may_stop=self._num_tokens > self._min_tokens)
        text = self._held + new
        if found is None:
            cut = len(text) - self._matcher.num_held
            self._held = text[cut:]
            return text[:cut]
        self._stopped_by, end = found
        cut = len(self._held) + end - (0 if self._include_stop else len(self._stopped_by))
        self._held = ""
        return text[:cut]

    def _send(self, delta: str) -> str:
        if delta:
            self._sent.append(delta)
        return delta

"""Source: text that comes in pieces, for parsers written as generators that pause where the text so far ends.

So a parser reads as if it had the whole text, and where the pieces are cut can't matter to it.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

__all__ = ["Source", "Steps"]

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser: pauses for more text, returns a T."""

_SPACE = re.compile(r"[ \t\n\r]*")


class Source:
    """`hold` notes where a candidate begins; `give_back` is its text so far, once it turns out to be none.

    Invariant: what was read is kept from the held position on, and dropped without one.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._held: int | None = None
        self._is_closed = False

    def feed(self, text: str) -> None:
        start = self._position if self._held is None else self._held
        self._text = self._text[start:] + text
        self._position -= start
        self._held = None if self._held is None else 0

    def close(self) -> None:
        """Nothing follows."""
        self._is_closed = True

    def hold(self) -> None:
        """From here on, unless text is held already."""
        if self._held is None:
            self._held = self._position

    @property
    def is_held(self) -> bool:
        return self._held is not None

    def release(self) -> None:
        self._held = None

    def give_back(self) -> str:
        """What was read since `hold`, "" without one; it is released."""
        text = "" if self._held is None else self._text[self._held : self._position]
        self._held = None
        return text

    def peek(self) -> Steps[str]:
        """The next character, not read yet; "" at the end."""
        while self._position == len(self._text):
            if self._is_closed:
                return ""
            yield
        return self._text[self._position]

    def take(self) -> str:
        """The character that was peeked at."""
        self._position += 1
        return self._text[self._position - 1]

    def some(self) -> Steps[str]:
        """Everything that has arrived; "" at the end only."""
        yield from self.peek()
        return self.take_run(_ANYTHING)

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """What `pattern` matches in the text that has arrived: possibly the beginning of a run."""
        match = pattern.match(self._text, self._position)
        assert match is not None, "the pattern must match the empty string"
        self._position = match.end()
        return match[0]

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """The whole run of characters that `pattern`, a repeated class, matches."""
        pieces = [self.take_run(pattern)]
        while (yield from self.peek()) and (more := self.take_run(pattern)):
            pieces.append(more)
        return "".join(pieces)

    def space(self) -> Steps[str]:
        return self.run(_SPACE)

    def literal(self, text: str) -> Steps[bool]:
        """Whether `text` comes next. It is read if so, otherwise nothing is."""
        while not self._text.startswith(text, self._position):
            if self._is_closed or not text.startswith(self._text[self._position :]):
                return False
            yield
        self._position += len(text)
        return True

    def until(self, marker: str, emit: Callable[[str], None]) -> Steps[bool]:
        """Emit the text before `marker`, which is read and held; False where the end comes first."""
        while (found := self._text.find(marker, self._position)) < 0:
            cut = len(self._text) - (0 if self._is_closed else self._num_begun(marker))
            emit(self._text[self._position : cut])
            self._position = cut
            if self._is_closed:
                return False
            yield
        emit(self._text[self._position : found])
        self._held, self._position = found, found + len(marker)
        return True

    def _num_begun(self, marker: str) -> int:
        """Length of the longest end of the text that begins `marker`."""
        longest = min(len(marker) - 1, len(self._text) - self._position)
        return next((n for n in range(longest, 0, -1) if self._text.endswith(marker[:n])), 0)


_ANYTHING = re.compile(".*", re.DOTALL)

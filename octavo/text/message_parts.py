"""What a model's message consists of, in the order it is written: reasoning, content, tool calls."""

from dataclasses import dataclass

__all__ = ["CallArguments", "CallStart", "Content", "Part", "PartSink", "Reasoning"]


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that was started last. Joined they are JSON, if the call was completed."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


class PartSink:
    """Collects parts from a parser; neighbours of one kind are joined.

    White space at the end of reasoning is left out, and at the end of the content where there are calls.
    """

    def __init__(self, max_calls: int | None = None, keeps_reasoning: bool = True) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._keeps_reasoning = keeps_reasoning
        self._is_dropping = False  # the present call is one too many
        self._parts: list[Part] = []
        self._kind: type[Content] | type[Reasoning] | type[CallArguments] = Content
        self._texts: list[str] = []  # of the part that is not in _parts yet
        self._space = {Content: "", Reasoning: ""}

    def content(self, text: str) -> None:
        self._append_but_space(Content, text)

    def reasoning(self, text: str) -> None:
        if self._keeps_reasoning:
            self._append_but_space(Reasoning, text)

    def start_call(self, name: str) -> None:
        self._is_dropping = self.num_calls == self._max_calls
        if not self._is_dropping:
            self._close()
            self._parts.append(CallStart(self.num_calls, name))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        if not self._is_dropping:
            self._append(CallArguments, text)

    def finish(self) -> None:
        """Nothing follows."""
        if not self.num_calls:
            self._append(Content, self._space[Content])

    def drain(self) -> list[Part]:
        """The parts since the last time."""
        self._close()
        parts, self._parts = self._parts, []
        return parts

    def _append_but_space(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._append(kind, self._space[kind] + kept)
            self._space[kind] = ""
        self._space[kind] += text[len(kept) :]

    def _append(self, kind: type[Content] | type[Reasoning] | type[CallArguments], text: str) -> None:
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._texts.append(text)

    def _close(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if not text:
            return
        if self._kind is CallArguments:
            self._parts.append(CallArguments(self.num_calls - 1, text))
        else:
            self._parts.append(Content(text) if self._kind is Content else Reasoning(text))

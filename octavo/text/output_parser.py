"""OutputParser: a model's message taken apart while it arrives. Knows no tokens and no HTTP."""

from collections.abc import Callable

from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import Part, PartSink

__all__ = ["OutputParser", "Read", "read_content"]

Read = Callable[[Source, PartSink], Steps[None]]
"""Reads a source to its end."""


class OutputParser:
    """The parts of all calls joined are the same however the text is cut."""

    def __init__(self, read: Read, max_calls: int | None = None, keeps_reasoning: bool = True) -> None:
        """`max_calls`: further calls are left out."""
        self._source = Source()
        self._sink = PartSink(max_calls, keeps_reasoning)
        self._steps = read(self._source, self._sink)

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the parts that are certain."""
        self._source.feed(text)
        next(self._steps)
        return self._sink.drain()

    def finish(self) -> list[Part]:
        """Nothing follows: return the rest."""
        self._source.close()
        next(self._steps, None)
        self._sink.finish()
        return self._sink.drain()


def read_content(source: Source, sink: PartSink) -> Steps[None]:
    while text := (yield from source.some()):
        sink.content(text)

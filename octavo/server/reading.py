"""Reading: how one chat request's answers are taken apart into reasoning, content and calls."""

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import UNSET

from octavo.server.responses import ChatMessage, Delta, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from octavo.text.message_parts import CallArguments, CallStart, Content, Part, Reasoning
from octavo.text.output_parser import OutputParser, Read

__all__ = ["MessageReader", "Reading"]

ALPHANUMERIC = string.ascii_letters + string.digits


def long_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters or digits, which is all that Mistral's templates take."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What all choices of a request share. Without `read` the text is the content."""

    read: Read | None = None
    markers: frozenset[str] = frozenset()
    """Texts of special tokens that `read` needs to see."""
    max_calls: int | None = None
    keeps_reasoning: bool = True
    finish_reason: str = "tool_calls"
    """Of an answer with calls that ends by itself."""
    new_call_id: Callable[[], str] = long_call_id


class MessageReader:
    """One choice's message."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._parser: OutputParser | None = None
        if reading.read is not None:
            self._parser = OutputParser(reading.read, reading.max_calls, reading.keeps_reasoning)

    def parts(self, text: str, is_last: bool) -> list[Part]:
        """What more text adds to the message."""
        if self._parser is None:
            return [Content(text)] if text else []
        return self._parser.feed(text) + (self._parser.finish() if is_last else [])

    def delta(self, part: Part) -> Delta:
        match part:
            case Content(text):
                return Delta(content=text)
            case Reasoning(text):
                return Delta(reasoning=text, reasoning_content=text)
            case CallStart(index, name):
                start = FunctionDelta(name=name, arguments="")
                call = ToolCallDelta(index, id=self._reading.new_call_id(), type="function", function=start)
                return Delta(tool_calls=[call])
            case CallArguments(index, text):
                return Delta(tool_calls=[ToolCallDelta(index, function=FunctionDelta(arguments=text))])

    def message(self, parts: Iterable[Part]) -> ChatMessage:
        """The message that all parts make: its content is null where reasoning or calls stand in its place."""
        content, reasoning = "", ""
        calls: list[tuple[str, list[str]]] = []
        for part in parts:
            match part:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallStart(_, name):
                    calls.append((name, []))
                case CallArguments(index, text):
                    calls[index][1].append(text)
        return ChatMessage(
            content=None if not content and (calls or reasoning) else content,
            reasoning=reasoning or None,
            reasoning_content=reasoning or None,
            tool_calls=[
                ToolCall(id=self._reading.new_call_id(), function=FunctionCall(name, "".join(arguments)))
                for name, arguments in calls
            ]
            or UNSET,
        )

    def finish_reason(self, given: str | None) -> str | None:
        """`given` is what ended the text."""
        has_calls = self._parser is not None and self._parser.num_calls
        return self._reading.finish_reason if has_calls and given == "stop" else given

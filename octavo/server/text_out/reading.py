"""Reading: how one chat request's answers are taken apart into reasoning, content and calls."""

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET

from octavo.server.requests.tool_use import ToolUse
from octavo.server.text_out.message import ChatMessage, Delta, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from octavo.text.detokenizer import TokenBytes
from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import CallArguments, CallStart, Content, Part, PartSink, Reasoning
from octavo.text.output_parser import OutputParser, Read, read_content
from octavo.text.reasoning import ReasoningFormat, read_reasoning
from octavo.text.tool_calls import ToolFormat
from octavo.text.tool_calls.forced import read_named_arguments, read_required_calls

__all__ = ["MessageReader", "Reading", "plan_reading"]

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
    is_former: bool = False
    """The one call is a `function_call`, in OpenAI's former way."""

    def visible(self, tokenizer: TokenBytes) -> TokenBytes:
        """`tokenizer`, to which the markers are no special tokens, so that they are not left out of the text."""
        return _VisibleMarkers(tokenizer, self.markers) if self.markers else tokenizer


@dataclass(frozen=True, slots=True)
class _VisibleMarkers:
    tokenizer: TokenBytes
    markers: frozenset[str]

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        if not self.tokenizer.is_special(token_id):
            return False
        return self.tokenizer.token_bytes(token_id).decode(errors="replace") not in self.markers


def plan_reading(
    use: ToolUse,
    tools: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    *,
    is_reasoning_open: bool,
    keeps_reasoning: bool,
) -> Reading:
    """`tools` and `reasoning` are the model's ways to write them. A forced call is written in octavo's own way, and
    without reasoning; OpenAI ends it with "stop" where the function was named."""
    new_call_id = short_call_id if tools is not None and tools.has_short_ids else long_call_id
    if use.mode == "named":
        read = partial(read_named_arguments, name=use.functions[0].name)
        return Reading(read=read, finish_reason="stop", new_call_id=new_call_id, is_former=use.is_former)
    if use.mode == "required":
        return Reading(read=read_required_calls, new_call_id=new_call_id)
    if use.mode == "none":
        tools = None
    if tools is None and reasoning is None:
        return Reading()
    markers = () if reasoning is None else (reasoning.start, reasoning.end)
    return Reading(
        read=partial(_read_message, tools=tools, names=use.names, reasoning=reasoning, is_open=is_reasoning_open),
        markers=frozenset([*markers, *(() if tools is None else tools.markers)]),
        max_calls=None if use.is_parallel else 1,
        keeps_reasoning=keeps_reasoning,
        finish_reason="function_call" if use.is_former else "tool_calls",
        new_call_id=new_call_id,
        is_former=use.is_former,
    )


def _read_message(
    source: Source,
    sink: PartSink,
    tools: ToolFormat | None,
    names: frozenset[str],
    reasoning: ReasoningFormat | None,
    is_open: bool,
) -> Steps[None]:
    if reasoning is not None:
        yield from read_reasoning(source, sink, reasoning, is_open)
    yield from read_content(source, sink) if tools is None else tools.read(source, sink, names)


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
                if self._reading.is_former:
                    return Delta(function_call=start)
                call = ToolCallDelta(index, id=self._reading.new_call_id(), type="function", function=start)
                return Delta(tool_calls=[call])
            case CallArguments(_, text) if self._reading.is_former:
                return Delta(function_call=FunctionDelta(arguments=text))
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
        functions = [FunctionCall(name, "".join(arguments)) for name, arguments in calls]
        is_former = self._reading.is_former and bool(functions)
        return ChatMessage(
            content=None if not content and (calls or reasoning) else content,
            reasoning=reasoning or None,
            reasoning_content=reasoning or None,
            tool_calls=UNSET
            if is_former or not functions
            else [ToolCall(id=self._reading.new_call_id(), function=function) for function in functions],
            function_call=functions[0] if is_former else UNSET,
        )

    def finish_reason(self, given: str | None) -> str | None:
        """`given` is what ended the text."""
        has_calls = self._parser is not None and self._parser.num_calls
        return self._reading.finish_reason if has_calls and given == "stop" else given

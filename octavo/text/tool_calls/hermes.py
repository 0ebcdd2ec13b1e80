"""Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, once a call."""

from collections.abc import Collection

from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import PartSink
from octavo.text.tool_calls.json_call import read_calls
from octavo.text.tool_calls.json_text import NotACall

__all__ = ["END", "START", "read_hermes"]

START = "<tool_call>"
END = "</tool_call>"


def read_hermes(source: Source, sink: PartSink, names: Collection[str]) -> Steps[None]:
    while (yield from source.until(START, sink.content)):
        try:
            yield from source.space()
            while True:
                yield from read_calls(source, sink, None)
                sink.content((yield from source.space()))
                if (yield from source.peek()) != "{":
                    break
            yield from source.literal(END)
        except NotACall:
            sink.content(source.give_back())

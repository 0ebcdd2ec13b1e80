"""Calls that the request demands: a grammar lets the model write nothing else, in the forms of vLLM."""

from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import PartSink
from octavo.text.tool_calls.json_call import read_calls
from octavo.text.tool_calls.json_text import NotACall

__all__ = ["read_named_arguments", "read_required_calls"]


def read_named_arguments(source: Source, sink: PartSink, name: str) -> Steps[None]:
    """The text is the arguments of `name`."""
    sink.start_call(name)
    while text := (yield from source.some()):
        sink.arguments(text)


def read_required_calls(source: Source, sink: PartSink) -> Steps[None]:
    """The text is an array of {"name": …, "parameters": {…}}."""
    try:
        yield from source.space()
        yield from read_calls(source, sink, None)
    except NotACall:
        sink.content(source.give_back())
    while text := (yield from source.some()):
        sink.content(text)

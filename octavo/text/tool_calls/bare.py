"""Calls without a marker of their own, recognised at the start of a line and by the name of a function that exists.

JSON objects (Llama 3 writes {"name": …, "parameters": {…}}; {…}, and <|python_tag|> before it, or not) or Python calls.
"""

from collections.abc import Callable, Collection

from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import PartSink
from octavo.text.tool_calls.json_call import read_calls
from octavo.text.tool_calls.json_text import NotACall
from octavo.text.tool_calls.pythonic import read_call_list

__all__ = ["PYTHON_END", "PYTHON_START", "PYTHON_TAG", "read_json", "read_llama_json", "read_pythonic"]

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
ReadCandidate = Callable[[Source, PartSink, Collection[str]], Steps[None]]


def read_json(source: Source, sink: PartSink, names: Collection[str]) -> Steps[None]:
    yield from _read(source, sink, names, "{[", _read_json_calls, ())


def read_llama_json(source: Source, sink: PartSink, names: Collection[str]) -> Steps[None]:
    yield from _read(source, sink, names, "{[", _read_json_calls, (PYTHON_TAG,))


def read_pythonic(source: Source, sink: PartSink, names: Collection[str]) -> Steps[None]:
    yield from _read(source, sink, names, "[", read_call_list, (PYTHON_START, PYTHON_END))


def _read_json_calls(source: Source, sink: PartSink, names: Collection[str]) -> Steps[None]:
    """Calls and the semicolon that may follow them."""
    yield from read_calls(source, sink, names)
    sink.content((yield from source.space()))
    yield from source.literal(";")


def _read(
    source: Source,
    sink: PartSink,
    names: Collection[str],
    openers: str,
    read_candidate: ReadCandidate,
    tags: tuple[str, ...],
) -> Steps[None]:
    """`tags` are left out wherever they stand: what follows one is a call, or plain text."""
    is_line_start = True
    while character := (yield from source.peek()):
        if (yield from _skip_tag(source, character, tags)):
            is_line_start = True
        elif is_line_start and character in openers:
            source.hold()
            try:
                yield from read_candidate(source, sink, names)
            except NotACall:
                sink.content(source.give_back())
                is_line_start = False
        else:
            sink.content(source.take())
            is_line_start = character == "\n" or (is_line_start and character.isspace())


def _skip_tag(source: Source, character: str, tags: tuple[str, ...]) -> Steps[bool]:
    for tag in tags:
        if tag[0] == character and (yield from source.literal(tag)):
            return True
    return False

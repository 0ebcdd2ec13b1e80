"""Mistral: [TOOL_CALLS] [{"name": …, "arguments": {…}}], and since 2025 [TOOL_CALLS]name[ARGS]{…} for each call."""

import re
from collections.abc import Collection

from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import PartSink
from octavo.text.tool_calls.json_call import read_arguments, read_calls
from octavo.text.tool_calls.json_text import NotACall

__all__ = ["ARGUMENTS", "CALL_ID", "START", "read_mistral"]

START = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_WORD = re.compile(r"[\w.-]*")


def read_mistral(source: Source, sink: PartSink, names: Collection[str]) -> Steps[None]:
    while (yield from source.until(START, sink.content)):
        try:
            yield from source.space()
            if (yield from source.peek()) in ("[", "{"):
                yield from read_calls(source, sink, None)
            else:
                yield from _read_named_call(source, sink)
        except NotACall:
            sink.content(source.give_back())


def _read_named_call(source: Source, sink: PartSink) -> Steps[None]:
    name = yield from source.run(_WORD)
    if (yield from source.literal(CALL_ID)):
        yield from source.run(_WORD)
    has_mark = yield from source.literal(ARGUMENTS)
    yield from source.space()
    if not name or not (has_mark or (yield from source.peek()) == "{"):
        raise NotACall
    source.release()
    sink.start_call(name)
    yield from read_arguments(source, sink.arguments)

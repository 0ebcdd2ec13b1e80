"""JSON read while it arrives and handed on as it is written, so that a value can be streamed before it is complete.

Two slips that models make inside strings are mended: bare control characters, and escapes that JSON does not have.
"""

import json
import re
from collections.abc import Callable

from octavo.text.incremental import Source, Steps

__all__ = ["NotACall", "copy_value", "discard", "expect", "read_array", "read_object", "read_string"]

Emit = Callable[[str], None]
MAX_DEPTH = 100
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_HEX_DIGIT = re.compile(r"[0-9A-Fa-f]?")


class NotACall(Exception):
    """What was read can't be (the rest of) a call, or the text ends in its middle."""


def discard(text: str) -> None:
    """An Emit for what nobody needs."""


def expect(source: Source, character: str) -> Steps[str]:
    if (yield from source.peek()) != character:
        raise NotACall
    return source.take()


def copy_value(source: Source, emit: Emit, depth: int = 0) -> Steps[None]:
    """Read any one value. Raises NotACall for what is not JSON, or is nested too deeply."""
    if depth > MAX_DEPTH:
        raise NotACall
    match (yield from source.peek()):
        case "{":
            yield from read_object(source, emit, lambda key: copy_value(source, emit, depth + 1))
        case "[":
            yield from read_array(source, emit, lambda: copy_value(source, emit, depth + 1))
        case '"':
            yield from read_string(source, emit)
        case _:
            text = yield from source.run(_SCALAR_CHARACTERS)
            emit(text)
            if not _SCALAR.fullmatch(text):
                raise NotACall


def read_object(source: Source, emit: Emit, read_member: Callable[[str], Steps[None]]) -> Steps[None]:
    """`read_member` is called with each key, to read the value."""

    def read_entry() -> Steps[None]:
        key = yield from read_string(source, emit)
        emit((yield from source.space()) + (yield from expect(source, ":")) + (yield from source.space()))
        yield from read_member(key)

    yield from _read_entries(source, emit, "{", read_entry, "}")


def read_array(source: Source, emit: Emit, read_item: Callable[[], Steps[None]]) -> Steps[None]:
    yield from _read_entries(source, emit, "[", read_item, "]")


def _read_entries(
    source: Source, emit: Emit, start: str, read_entry: Callable[[], Steps[None]], end: str
) -> Steps[None]:
    emit((yield from expect(source, start)) + (yield from source.space()))
    if (yield from source.peek()) != end:
        while True:
            yield from read_entry()
            emit((yield from source.space()))
            if (yield from source.peek()) != ",":
                break
            emit(source.take() + (yield from source.space()))
    emit((yield from expect(source, end)))


def read_string(source: Source, emit: Emit) -> Steps[str]:
    """The string's value; what is emitted is its JSON text."""
    written: list[str] = []

    def put(text: str) -> None:
        written.append(text)
        emit(text)

    put((yield from expect(source, '"')))
    while (character := (yield from source.peek())) != '"':
        if character == "\\":
            put((yield from _read_escape(source)))
        elif character < " ":
            if not character:
                raise NotACall
            put(json.dumps(source.take())[1:-1])
        else:
            put(source.take_run(_PLAIN))
    put(source.take())
    value: str = json.loads("".join(written))
    return value


def _read_escape(source: Source) -> Steps[str]:
    backslash, kind = source.take(), (yield from source.peek())
    if not kind:
        raise NotACall
    if kind == "u":
        source.take()
        digits = ""
        while len(digits) < 4 and (yield from source.peek()) and (digit := source.take_run(_HEX_DIGIT)):
            digits += digit
        return f"\\u{digits}" if len(digits) == 4 else f"\\\\u{digits}"
    if kind in '"\\/bfnrt':
        return backslash + source.take()
    return source.take() if kind == "'" else "\\\\"  # Python's \', or a backslash that meant itself

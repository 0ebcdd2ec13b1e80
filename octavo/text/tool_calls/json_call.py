"""One call written as a JSON object, {"name": …, "arguments": {…}}, or several as an array of them."""

import json
from collections.abc import Callable, Collection

from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import PartSink
from octavo.text.tool_calls.json_text import NotACall, copy_value, discard, read_array, read_object, read_string

__all__ = ["read_arguments", "read_calls"]

ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type")
"""What else models write into a call."""


def read_calls(source: Source, sink: PartSink, names: Collection[str] | None) -> Steps[None]:
    """Read an object or an array of them.

    `names`: functions that can be called; an object is a call only if it names one of them and has no keys of another
    kind of object, so that JSON that is the answer is told apart at once. With None, where a marker came before,
    whatever has a name is a call.
    Raises NotACall; what was read of the object is then still held, unless its call has been started.
    """

    def read_call() -> Steps[None]:
        source.hold()
        call = _Call(source, sink, names)
        yield from read_object(source, discard, call.read_member)
        call.end()

    if (yield from source.peek()) == "[":
        source.hold()
        yield from read_array(source, discard, read_call)
        if source.is_held:
            raise NotACall  # an empty array
    else:
        yield from read_call()


class _Call:
    """A call in the making. It is started when its name is known; arguments that come earlier wait."""

    def __init__(self, source: Source, sink: PartSink, names: Collection[str] | None) -> None:
        self._source = source
        self._sink = sink
        self._names = names
        self._name: str | None = None
        self._has_arguments = False
        self._is_started = False
        self._early: list[str] = []

    def read_member(self, key: str) -> Steps[None]:
        if key == "name" and self._name is None:
            self._name = yield from read_string(self._source, discard)
            if not self._name or (self._names is not None and self._name not in self._names):
                raise NotACall
            if self._names is None or self._has_arguments:
                self._start()
        elif key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            if self._name is not None:
                self._start()
            yield from read_arguments(self._source, self._emit)
        elif self._names is None or key in OTHER_KEYS:
            yield from copy_value(self._source, discard)
        else:
            raise NotACall

    def end(self) -> None:
        if self._name is None:
            raise NotACall
        self._start()
        if not self._has_arguments:
            self._sink.arguments("{}")

    def _emit(self, text: str) -> None:
        if self._is_started:
            self._sink.arguments(text)
        else:
            self._early.append(text)

    def _start(self) -> None:
        if not self._is_started and self._name is not None:
            self._is_started = True
            self._source.release()
            self._sink.start_call(self._name)
            self._sink.arguments("".join(self._early))


def read_arguments(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    """As they are written; null becomes {}, and a string that holds JSON that JSON."""
    match (yield from source.peek()):
        case '"':
            text = yield from read_string(source, discard)
            emit(_unwrapped(text))
        case "n":
            yield from copy_value(source, discard)  # null: nothing else begins so
            emit("{}")
        case _:
            yield from copy_value(source, emit)


def _unwrapped(text: str) -> str:
    if not text.strip():
        return "{}"
    try:
        is_object = isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        is_object = False
    return text if is_object else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

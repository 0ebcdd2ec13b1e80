"""Calls in Python's syntax, [f(a=1), g(b="x")], their arguments turned into JSON one by one."""

import ast
import json
import re
import warnings
from collections.abc import Collection
from typing import Any

from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import PartSink
from octavo.text.tool_calls.json_text import NotACall, expect

__all__ = ["read_call_list"]

_NAME = re.compile(r"[\w.-]*")
_CONSTANTS = {"true": True, "false": False, "null": None}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


def read_call_list(source: Source, sink: PartSink, names: Collection[str]) -> Steps[None]:
    """Raises NotACall; what belongs to no call is then held."""
    source.hold()
    yield from expect(source, "[")
    while True:
        yield from source.space()
        yield from _read_call(source, sink, names)
        source.hold()
        yield from source.space()
        if (yield from source.peek()) != ",":
            break
        source.take()
    yield from expect(source, "]")
    source.release()


def _read_call(source: Source, sink: PartSink, names: Collection[str]) -> Steps[None]:
    name = yield from source.run(_NAME)
    yield from expect(source, "(")
    if name not in names:
        raise NotACall
    yield from source.space()
    separator = "{"
    while (yield from source.peek()) != ")":
        source.hold()
        argument = yield from _read_argument(source)
        if separator == "{":
            sink.start_call(name)
        source.release()
        sink.arguments(separator + argument)
        separator = ", "
        if (yield from source.peek()) == ",":
            source.take()
            yield from source.space()
    source.take()
    source.release()
    if separator == "{":
        sink.start_call(name)
        sink.arguments("{")
    sink.arguments("}")


def _read_argument(source: Source) -> Steps[str]:
    """One `name=value` as a member of a JSON object."""
    name = yield from source.run(_NAME)
    yield from source.space()
    yield from expect(source, "=")
    value = yield from _read_expression(source)
    if not name:
        raise NotACall
    return f"{json.dumps(name)}: {_to_json(value)}"


def _read_expression(source: Source) -> Steps[str]:
    """The text up to a comma or closing bracket of the call; commas in strings and in brackets belong to it."""
    text: list[str] = []
    closers: list[str] = []
    quote = ""
    while character := (yield from source.peek()):
        if quote:
            if character == "\\":
                text.append(source.take())
                if not (yield from source.peek()):
                    break
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in _CLOSERS:
            closers.append(_CLOSERS[character])
        elif closers and character == closers[-1]:
            closers.pop()
        elif not closers and character in ",)":
            return "".join(text).strip()
        text.append(source.take())
    raise NotACall


def _to_json(expression: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\d" is no escape
            warnings.simplefilter("ignore", DeprecationWarning)  # so says Python 3.11
            tree = ast.parse(expression, mode="eval")
        return json.dumps(_value(tree.body), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise NotACall from None


def _value(node: ast.expr) -> Any:
    """What a literal stands for. Raises ValueError for any other expression: nothing is evaluated."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("not a string")

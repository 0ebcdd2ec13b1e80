"""Tools in requests: their definitions, the choice among them, and the calls in messages of before.

Fields beside the declared ones reach the chat template as they are.
"""

import ast
import json
from typing import Any, Literal

from pydantic_core import from_json

from octavo.server.requests.fields import Fields

__all__ = [
    "CalledFunction",
    "FunctionDefinition",
    "FunctionName",
    "MessageCall",
    "NamedToolChoice",
    "Tool",
    "arguments_for_template",
]


MAX_PYTHON_CHARACTERS = 64 << 10
"""Python's parser takes a hundred times the memory of its text."""


class FunctionDefinition(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; without one the function takes no arguments."""
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(Fields):
    name: str


class NamedToolChoice(Fields):
    type: Literal["function"] = "function"
    function: FunctionName


class CalledFunction(Fields):
    name: str
    arguments: str | dict[str, Any] | None = None


class MessageCall(Fields):
    """A call that an assistant's message made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


def arguments_for_template(arguments: str | dict[str, Any] | None) -> dict[str, Any] | str:
    """An object, as templates expect, out of what a model wrote: JSON, JSON that a limit cut off, or a dict as Python
    writes it. Other text stays as it is."""
    if not isinstance(arguments, str):
        return arguments or {}
    if not arguments.strip():
        return {}
    for read in (json.loads, _read_python, _read_beginning):
        try:
            value = read(arguments)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, dict):
            return value
    return arguments


def _read_python(text: str) -> Any:
    if len(text) > MAX_PYTHON_CHARACTERS:
        raise ValueError("too long")
    return ast.literal_eval(text.strip())


def _read_beginning(text: str) -> Any:
    return from_json(text, allow_partial="trailing-strings")

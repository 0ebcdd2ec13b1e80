"""Tools in requests: their definitions, the choice among them, and the calls in messages of before.

Fields beside the declared ones reach the chat template as they are.
"""

import json
from typing import Any, Literal

from octavo.errors import InvalidRequestError
from octavo.server.requests.fields import Fields

__all__ = ["FunctionDefinition", "MessageCall", "NamedToolChoice", "Tool", "arguments_for_template"]


class FunctionDefinition(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; without one the function takes no arguments."""
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Fields):
    name: str


class NamedToolChoice(Fields):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Fields):
    name: str
    arguments: str | dict[str, Any] | None = None


class MessageCall(Fields):
    """A call that an assistant's message made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


def arguments_for_template(arguments: str | dict[str, Any] | None, where: str) -> dict[str, Any]:
    """An object, as templates expect; `where` is named in the InvalidRequestError for a string that holds none."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} must be a JSON object: {error}.", param="messages") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where} must be a JSON object, got {arguments[:50]!a}.", param="messages")
    return value

"""ToolUse: what a request lets or makes the model do with its tools, and the grammar that makes it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams, StructuredOutputs
from octavo.server.requests.tools import FunctionDefinition, NamedToolChoice, Tool

__all__ = ["ToolUse", "choose"]

MAX_TOOLS = 128  # OpenAI's limit
MAX_NAME = 64  # characters; OpenAI's limit
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
LITERAL_KEYS = frozenset(["const", "default", "enum", "example", "examples"])
"""Keywords of a JSON schema whose values are data."""
SCHEMA_MAPS = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
"""Those whose values map names of the user's to schemas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    mode: Literal["none", "auto", "required", "named"]
    functions: Sequence[FunctionDefinition] = ()
    """With "named" there is one."""
    is_parallel: bool = True
    """There may be more than one call."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """`params` with the grammar of a forced call: arguments of the named function, or an array of calls.

        It takes the place of a grammar for the content, of which there is none. Raises InvalidRequestError.
        """
        if self.mode not in ("named", "required"):
            return params
        try:
            schema = _arguments_schema(self.functions[0]) if self.mode == "named" else self._calls_schema()
            return replace(params, structured_outputs=StructuredOutputs(json=json.dumps(schema)))
        except RecursionError:
            raise InvalidRequestError("The schemas of the tools are nested too deeply.", param="tools") from None
        except InvalidRequestError as error:
            raise InvalidRequestError(f"The schemas of the tools: {error.message}", param="tools") from None

    def _calls_schema(self) -> dict[str, Any]:
        calls = []
        for i, function in enumerate(self.functions):
            place = f"#/items/anyOf/{i}/properties/parameters"
            properties = {
                "name": {"type": "string", "enum": [function.name]},
                "parameters": _moved(_arguments_schema(function), place),
            }
            calls.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        most = {} if self.is_parallel else {"maxItems": 1}
        return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def choose(
    tools: Sequence[Tool] | None, choice: Literal["none", "auto", "required"] | NamedToolChoice | None, parallel: bool
) -> ToolUse:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` ask for together. Raises InvalidRequestError."""
    functions = [tool.function for tool in tools or ()]
    _check(functions)
    mode = "named" if isinstance(choice, NamedToolChoice) else choice or "auto"
    if not functions:
        if mode in ("named", "required"):
            raise InvalidRequestError("tool_choice forces a call, but tools is empty.", param="tool_choice")
        return ToolUse(mode="none")
    if isinstance(choice, NamedToolChoice):
        functions = [function for function in functions if function.name == choice.function.name][:1]
        if not functions:
            raise InvalidRequestError(
                f"tool_choice names the function {choice.function.name[:MAX_NAME]!a}, which is not among the tools.",
                param="tool_choice",
            )
    return ToolUse(mode=mode, functions=functions, is_parallel=parallel)


def _check(functions: Sequence[FunctionDefinition]) -> None:
    if len(functions) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must be at most {MAX_TOOLS}, got {len(functions)}.", param="tools")
    for i, function in enumerate(functions):
        if not 0 < len(function.name) <= MAX_NAME:
            raise InvalidRequestError(
                f"tools[{i}].function.name must have 1 to {MAX_NAME} characters, got {function.name[:MAX_NAME]!a}.",
                param="tools",
            )
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object":
            raise InvalidRequestError(
                f"tools[{i}].function.parameters must be a JSON schema of type 'object', got {str(kind)[:MAX_NAME]!a}.",
                param="tools",
            )


def _arguments_schema(function: FunctionDefinition) -> Mapping[str, Any]:
    """Arguments are an object, even where the schema forgets to say so."""
    return {"type": "object", **function.parameters} if function.parameters else NO_ARGUMENTS


def _moved(schema: Any, place: str) -> Any:
    """A schema that has become part of another: references to its own parts begin with `place`."""
    match schema:
        case Mapping():
            return {key: _moved_value(key, value, place) for key, value in schema.items()}
        case list():
            return [_moved(item, place) for item in schema]
    return schema


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    if key in LITERAL_KEYS:
        return value
    if key in SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: _moved(part, place) for name, part in value.items()}
    return _moved(value, place)

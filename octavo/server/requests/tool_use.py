"""ToolUse: what a request lets or makes the model do with its tools, and the grammar that makes it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams, StructuredOutputs
from octavo.server.requests.tools import FunctionDefinition, NamedToolChoice, Tool
from octavo.text.json_schema import rewrite

__all__ = ["ToolUse", "choose"]

MAX_TOOLS = 128  # OpenAI's limit
MAX_NAME = 64  # characters; OpenAI's limit
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
USUAL_TYPES: Mapping[str, str] = {
    "bool": "boolean",
    "dict": "object",
    "double": "number",
    "float": "number",
    "int": "integer",
    "list": "array",
    "none": "null",
    "str": "string",
    "tuple": "array",
}
"""Names of programming languages for JSON's types, which tools often have in their schemas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    mode: Literal["none", "auto", "required", "named"]
    functions: Sequence[FunctionDefinition] = ()
    """With "named" there is one."""
    is_parallel: bool = True
    """There may be more than one call."""
    is_former: bool = False
    """The answer has its one call as `function_call`, in OpenAI's former way."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """`params` with the grammar of a forced call: arguments of the named function, or an array of calls.

        Raises InvalidRequestError, also where a grammar for the content was asked for: a forced call has no content.
        """
        if self.mode not in ("named", "required"):
            return params
        if params.structured_outputs is not None:
            raise InvalidRequestError(
                "tool_choice forces a call, which leaves no content that structured output could rule. Ask for one of "
                "the two.",
                param="tool_choice",
            )
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
    tools: Sequence[Tool],
    choice: Literal["none", "auto", "required"] | NamedToolChoice | None,
    is_parallel: bool,
    is_former: bool = False,
) -> ToolUse:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` ask for together. Raises InvalidRequestError."""
    functions = [tool.function for tool in tools]
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
    return ToolUse(mode=mode, functions=functions, is_parallel=is_parallel and not is_former, is_former=is_former)


def _check(functions: Sequence[FunctionDefinition]) -> None:
    if len(functions) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must be at most {MAX_TOOLS}, got {len(functions)}.", param="tools")
    for i, function in enumerate(functions):
        if not 0 < len(function.name) <= MAX_NAME:
            raise InvalidRequestError(
                f"tools[{i}].function.name must have 1 to {MAX_NAME} characters, got {function.name[:MAX_NAME]!a}.",
                param="tools",
            )
        kind = _usual_types(function.parameters or {}).get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            raise InvalidRequestError(
                f"tools[{i}].function.parameters must be a JSON schema of type 'object', got {str(kind)[:MAX_NAME]!a}.",
                param="tools",
            )


def _arguments_schema(function: FunctionDefinition) -> Mapping[str, Any]:
    """Arguments are an object, even where the schema forgets to say so, or allows something else beside."""
    if not function.parameters:
        return NO_ARGUMENTS
    return {**rewrite(function.parameters, _usual_types), "type": "object"}


def _usual_types(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The types of one schema under their names in JSON: OBJECT and dict are object, and any is no demand."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    types = [USUAL_TYPES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)]
    if len(types) < len(names):
        return dict(schema)
    others = {key: value for key, value in schema.items() if key != "type"}
    if "any" in types:
        return others
    return others | {"type": types if isinstance(given, list) else types[0]}


def _moved(schema: Mapping[str, Any], place: str) -> Any:
    """A schema that has become part of another: references to its own parts begin with `place`."""

    def move(part: dict[str, Any]) -> dict[str, Any]:
        target = part.get("$ref")
        return part | {"$ref": place + target[1:]} if isinstance(target, str) and target.startswith("#") else part

    return rewrite(schema, move)

"""The fields that ask for structured output: OpenAI's response_format, vLLM's structured_outputs, and other dialects.

Their shapes, and what they ask for together. Whether it compiles is found out in `grammar_check.py`.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from pydantic import ConfigDict, Field

from octavo.errors import InvalidRequestError
from octavo.sampling_params import StructuredOutputs
from octavo.server.requests.fields import Fields

__all__ = ["ResponseFormat", "StructureFields"]


class JsonSchema(Fields):
    """What `strict` is makes no difference: the schema is always kept to."""

    name: str = Field(min_length=1)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's, and what other servers make of it."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """Beside the type, where llama.cpp and others have it."""
    value: dict[str, Any] | str | None = None
    """The schema or the expression, in text-generation-inference's way."""
    pattern: str | None = None
    grammar: str | None = None

    def structure(self) -> StructuredOutputs | None:
        text = self.value if isinstance(self.value, str) else None
        match self.type:
            case "text":
                return None
            case "regex" if (pattern := self.pattern or text) is not None:
                return StructuredOutputs(regex=pattern)
            case "grammar" if (grammar := self.grammar or text) is not None:
                return StructuredOutputs(grammar=grammar)
            case "json_schema" if self.json_schema is not None:
                return StructuredOutputs(json=self.json_schema.schema_)
            case "json" | "json_object" | "json_schema" if (schema := self.schema_ or self.value) is not None:
                return StructuredOutputs(json=schema)
            case "json_object":
                return StructuredOutputs(json_object=True)
        needed = {"json_schema": "json_schema", "json": "value", "regex": "pattern", "grammar": "grammar"}[self.type]
        raise InvalidRequestError(
            f"response_format of type '{self.type}' needs {needed}.",
            param="response_format",
        )


class StructuredOutputsField(Fields):
    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    """A JSON schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In Lark's syntax or in GBNF."""
    whitespace_pattern: str | None = None
    """Between the tokens of JSON."""
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    """Without effect: there is one compiler."""

    def structure(self) -> StructuredOutputs:
        return StructuredOutputs(
            json=self.json_,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
            whitespace_pattern="" if self.disable_any_whitespace else self.whitespace_pattern,
        )


class StructureFields(Fields):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | None = None
    """llama.cpp's and SGLang's: a schema, its text, or what OpenAI puts around it."""
    grammar: str | None = None
    """llama.cpp's."""
    regex: str | None = None
    """SGLang's."""
    ebnf: str | None = None
    """SGLang's name for a grammar."""
    format: str | dict[str, Any] | None = None
    """Ollama's: "json" or a schema."""

    def structure(self) -> StructuredOutputs | None:
        """Raises InvalidRequestError for fields that contradict one another."""
        given = self._structures
        if len(given) > 1:
            names = ", ".join(sorted(given))
            raise InvalidRequestError(f"Only one of these may ask for structured output: {names}.", param=min(given))
        return next(iter(given.values()), None)

    @property
    def structure_field(self) -> str | None:
        """The name of the field that asks for structured output."""
        return next(iter(self._structures), None)

    @cached_property
    def _structures(self) -> dict[str, StructuredOutputs]:
        given: dict[str, StructuredOutputs] = {}
        if self.structured_outputs is not None:
            given["structured_outputs"] = self.structured_outputs.structure()
        if self.response_format is not None and (wish := self.response_format.structure()) is not None:
            given["response_format"] = wish
        for name in self.guided_fields():
            wish = StructuredOutputs(**{name.removeprefix("guided_"): getattr(self, name)})
            given[name] = replace(wish, whitespace_pattern=self.guided_whitespace_pattern)
        for name, kind in (("grammar", "grammar"), ("ebnf", "grammar"), ("regex", "regex")):
            if value := getattr(self, name):
                given[name] = StructuredOutputs(**{kind: value})
        if self.json_schema:
            given["json_schema"] = StructuredOutputs(json=_unwrapped(self.json_schema))
        if self.format not in (None, ""):
            given["format"] = self._format()
        return given

    def _format(self) -> StructuredOutputs:
        if self.format == "json":
            return StructuredOutputs(json_object=True)
        if isinstance(self.format, str):
            raise InvalidRequestError(
                f'format must be "json" or a JSON schema, got {self.format[:50]!a}.',
                param="format",
            )
        return StructuredOutputs(json=self.format)

    def guided_fields(self) -> list[str]:
        """Those of the older fields that are used."""
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        return [name for name in names if getattr(self, name) is not None]


def _unwrapped(schema: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(schema, dict) and "name" in schema and isinstance(schema.get("schema"), dict):
        inner: dict[str, Any] = schema["schema"]
        return inner
    return schema

"""The fields that ask for structured output: OpenAI's response_format, vLLM's structured_outputs and older guided_*.

Their shapes, and what they ask for together. Whether it compiles is found out in `grammar_check.py`.
"""

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
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structure(self) -> StructuredOutputs | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutputs(json_object=True)
        if self.json_schema is None:
            raise InvalidRequestError(
                "response_format of type 'json_schema' needs json_schema.", param="response_format"
            )
        return StructuredOutputs(json=self.json_schema.schema_)


class StructuredOutputsField(Fields):
    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    """A JSON schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In Lark's syntax or in GBNF."""

    def structure(self) -> StructuredOutputs:
        return StructuredOutputs(
            json=self.json_,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
        )


class StructureFields(Fields):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def structure(self) -> StructuredOutputs | None:
        """Raises InvalidRequestError for fields that contradict one another."""
        given = self._structures()
        if len(given) > 1:
            names = ", ".join(sorted(given))
            raise InvalidRequestError(f"Only one of these may ask for structured output: {names}.", param=min(given))
        return next(iter(given.values()), None)

    @property
    def structure_field(self) -> str | None:
        """The name of the field that asks for structured output."""
        return next(iter(self._structures()), None)

    def _structures(self) -> dict[str, StructuredOutputs]:
        given: dict[str, StructuredOutputs] = {}
        if self.structured_outputs is not None:
            given["structured_outputs"] = self.structured_outputs.structure()
        if self.response_format is not None and (wish := self.response_format.structure()) is not None:
            given["response_format"] = wish
        for name in self.guided_fields():
            given[name] = StructuredOutputs(**{name.removeprefix("guided_"): getattr(self, name)})
        return given

    def guided_fields(self) -> list[str]:
        """Those of the older fields that are used."""
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        return [name for name in names if getattr(self, name) is not None]

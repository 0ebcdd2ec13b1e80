"""Int and WireInt: integers as JSON knows them, where 2.0 is 2. Text and truth values are none."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

__all__ = ["Int", "WireInt"]


def _whole(value: float) -> int:
    if not value.is_integer():
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return int(value)


@dataclass(frozen=True, slots=True)
class _Whole:
    """Integers are taken natively; only a float costs a call."""

    lowest: int | None = None
    highest: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        whole_float = core_schema.no_info_after_validator_function(_whole, core_schema.float_schema(strict=True))
        integer = core_schema.union_schema(
            [core_schema.int_schema(strict=True), whole_float],
            mode="left_to_right",
            custom_error_type="int_type",
        )
        return core_schema.chain_schema([integer, core_schema.int_schema(ge=self.lowest, le=self.highest)])

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        bounds = {"minimum": self.lowest, "maximum": self.highest}
        return {"type": "integer", **{key: bound for key, bound in bounds.items() if bound is not None}}


Int = Annotated[int, _Whole()]
WireInt = Annotated[int, _Whole(-(2**31), 2**31 - 1)]
"""An integer whose range is checked elsewhere, but that must fit a message to the engine."""

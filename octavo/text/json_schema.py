"""Walking through a JSON schema: which of its values are schemas themselves, and which are data or names."""

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["rewrite"]

DATA_KEYWORDS = frozenset(["const", "default", "enum", "example", "examples"])
SCHEMA_MAPS = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
"""Keywords whose values map names of the author's to schemas."""


def rewrite(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy in which `change` has been applied to every schema, the inner ones first.

    Raises RecursionError for one that nests too deeply.
    """
    if isinstance(schema, list):
        return [rewrite(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return change({key: _rewrite_value(key, value, change) for key, value in schema.items()})


def _rewrite_value(key: str, value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if key in DATA_KEYWORDS:
        return value
    if key in SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: rewrite(part, change) for name, part in value.items()}
    return rewrite(value, change)

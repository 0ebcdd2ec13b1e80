"""Walking through a JSON schema: which of its values are schemas, and which of its keywords demand nothing."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["UNENFORCED", "demands", "rewrite", "unenforced"]

UNENFORCED = ("uniqueItems",)
"""Keywords that can't be kept while an output is generated token by token. They are left out, and warned of."""

DATA_KEYWORDS = frozenset(["const", "default", "enum", "example", "examples"])
SCHEMA_MAPS = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
"""Keywords whose values map names of the author's to schemas."""
IDLE: Mapping[str, Sequence[Any]] = {
    "dependencies": [{}],
    "dependentRequired": [{}],
    "dependentSchemas": [{}],
    "else": [True, {}],
    "not": [False],
    "propertyNames": [True, {}, {"type": "string"}],
    "then": [True, {}],
    "unevaluatedItems": [True, {}],
    "unevaluatedProperties": [True, {}],
    "uniqueItems": [False],
}
"""Values with which these keywords demand nothing."""


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


def demands(schema: dict[str, Any]) -> dict[str, Any]:
    """One schema without the keywords that demand nothing, and without those that can't be kept while generating.

    Raises ValueError for definitions that are none.
    """
    for name in ("$defs", "definitions"):
        if not isinstance(schema.get(name, {}), Mapping):
            raise ValueError(f"{name} must be an object.")
    kept = {key: value for key, value in schema.items() if not _is_idle(key, value)}
    for name in UNENFORCED:
        kept.pop(name, None)
    if "if" not in kept or not kept.keys() & {"then", "else"}:
        kept = {key: value for key, value in kept.items() if key not in ("if", "then", "else")}
    if "contains" not in kept or (kept.get("minContains") == 0 and "maxContains" not in kept):
        kept = {key: value for key, value in kept.items() if key not in ("contains", "minContains", "maxContains")}
    return kept


def _is_idle(key: str, value: Any) -> bool:
    if key in DATA_KEYWORDS:
        return False
    # True == 1, but 1 is no schema.
    return value is None or any(value == idle and type(value) is type(idle) for idle in IDLE.get(key, ()))


def unenforced(schema: str | None) -> list[str]:
    """The keywords of a schema, given as text, that an output may break."""
    if schema is None or not any(name in schema for name in UNENFORCED):
        return []
    found: set[str] = set()

    def look(part: dict[str, Any]) -> dict[str, Any]:
        if part.get("uniqueItems") is True and part.get("maxItems") not in (0, 1):
            found.add("uniqueItems")
        return part

    try:
        rewrite(json.loads(schema), look)
    except (ValueError, RecursionError):
        return []  # whoever compiles it will say so
    return sorted(found)

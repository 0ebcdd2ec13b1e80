"""parse: a body's bytes to the model of its route, or one sentence on the first field that is wrong."""

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from octavo.errors import InvalidRequestError

__all__ = ["parse", "validate"]

T = TypeVar("T", bound=BaseModel)
MAX_SHOWN = 100
"""Characters of a rejected value that an error message repeats."""
MAX_DEPTH = 2
"""Levels of it that are shown."""
MAX_TYPES = 20
"""Alternatives of a field's type that an error message names."""


def parse(kind: type[T], body: bytes) -> T:
    """Raises InvalidRequestError."""
    try:
        value = json.loads(body) if body else None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error.msg} at character {error.pos}.") from None
    except UnicodeDecodeError:
        raise InvalidRequestError("The body is not valid JSON: it is not encoded in UTF-8.") from None
    except ValueError:  # Python reads integers of 4,300 digits
        raise InvalidRequestError("The body holds a number with too many digits.") from None
    except RecursionError:
        raise InvalidRequestError("The body nests too deeply.") from None
    if _escaped_surrogate(body):
        _check_unicode(value)
    if not isinstance(value, dict):
        raise InvalidRequestError(
            "The body must be a JSON object, sent with the header Content-Type: application/json."
        )
    return validate(kind, value)


def validate(kind: type[T], value: dict[str, Any]) -> T:
    """A request from its fields. Raises InvalidRequestError for the first that is wrong."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from None


def _check_unicode(value: Any) -> None:
    """Raises InvalidRequestError for a lone surrogate: JSON can escape one, but no text holds it."""
    for name, member in value.items() if isinstance(value, dict) else (("body", value),):
        if (surrogate := _lone_surrogate([name, member])) is not None:
            shown = _plain(name)
            raise InvalidRequestError(
                f"{shown} is not valid Unicode: it has a lone surrogate, U+{ord(surrogate):04X}.", param=shown
            )


def _lone_surrogate(value: object) -> str | None:
    values = [value]
    while values:
        match values.pop():
            case str(text):
                if (found := _surrogate(text)) is not None:
                    return found[0]
            case list(items):
                values += items
            case dict(members):
                values += members.keys()
                values += members.values()
    return None


_escaped_surrogate = re.compile(rb"\\u[dD][89a-fA-F]").search
_surrogate = re.compile("[\ud800-\udfff]").search


def _refusal(error: ValidationError) -> InvalidRequestError:
    problems = error.errors(include_url=False)
    first = problems[0]
    path = first["loc"]
    param = _plain(str(path[0]))
    if first["type"] == "missing":
        return InvalidRequestError(f"{'.'.join(_plain(str(part)) for part in path)} is required.", param)
    # The alternatives of a union are reported one by one.
    wishes = {problem["msg"].removeprefix("Input should be ") for problem in problems if problem["loc"][0] == path[0]}
    wished = " or ".join(sorted(wishes)[:MAX_TYPES])
    return InvalidRequestError(f"{param} must be {wished}, got {_shown(first['input'])}.", param)


def _plain(name: str) -> str:
    return name.encode("ascii", "backslashreplace").decode()[:MAX_SHOWN]


def _shown(value: Any, depth: int = 0) -> str:
    """The beginning of the value; of one that holds many others, no more than takes no time."""
    match value:
        case str():
            text = ascii(value[: MAX_SHOWN + 1])
        case [_, *_] | {} if value and depth == MAX_DEPTH:
            text = "..."
        case list() if value:
            text = f"[{_shown(value[0], depth + 1)}{', ...' if len(value) > 1 else ''}]"
        case dict() if value:
            name, first = next(iter(value.items()))
            text = f"{{{_shown(name)}: {_shown(first, depth + 1)}{', ...' if len(value) > 1 else ''}}}"
        case _:
            text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."

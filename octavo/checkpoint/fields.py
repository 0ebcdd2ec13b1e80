"""Fields: typed, range-checked access to the key-value pairs of a checkpoint, with errors that name file and key.

Knows nothing of what the keys mean.
"""

import logging
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from octavo.errors import CheckpointError

__all__ = ["Fields"]

T = TypeVar("T")

MAX_INTEGER = 2**31 - 1

logger = logging.getLogger(__name__)


class Fields:
    """A view of `values`, which came from `path`, with `prefix` put before each key.

    A key whose value is None counts as absent. Every getter raises CheckpointError for a value of the wrong type or
    range; those that take a default raise it for an absent key too when the default is None.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def fail(self, key: str, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {self.prefix}{key} {reason}")

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def optional_integer(self, key: str, low: int = 0, high: int = MAX_INTEGER) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # some converters write counts as floats
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            self.fail(key, f"is {reprlib.repr(value)}, which is not an integer from {low} to {high}.")
        return value

    def optional_token_id(self, key: str, high: int = MAX_INTEGER) -> int | None:
        """A token's id. Tools write -1, unsigned too, for "none": that is left out, with a warning."""
        value = self.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and (value < 0 or value == 2**32 - 1):
            logger.warning("%s: %s%s is %s, which is no token: it is left out.", self.path, self.prefix, key, value)
            return None
        return self.optional_integer(key, high=high)

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_INTEGER) -> int:
        value = self.optional_integer(key, low, high)
        return self._or_default(key, value, default)

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0."""
        value = self.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 < value < 1e30 or not math.isfinite(value):
            self.fail(key, f"is {reprlib.repr(value)}, which is not a number above 0.")
        return float(value)

    def number(self, key: str, default: float | None = None) -> float:
        return self._or_default(key, self.optional_number(key), default)

    def optional_text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self.fail(key, f"is {reprlib.repr(value)}, which is not a string.")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return self._or_default(key, self.optional_text(key), default)

    def optional_flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.fail(key, f"is {reprlib.repr(value)}, which is neither true nor false.")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._or_default(key, self.optional_flag(key), default)

    def same_in_all_layers(self, key: str) -> "Fields":
        """These fields, `key` being one value where the file gives an array of one a layer, which must agree."""
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return self
        distinct = np.unique(value).tolist()
        if len(distinct) != 1:
            self.fail(key, f"differs between layers ({str(distinct)[:80]}), which is not supported.")
        return Fields(self.path, {self.prefix + key: distinct[0]}, self.prefix)

    def _or_default(self, key: str, value: T | None, default: T | None) -> T:
        if value is not None:
            return value
        if default is None:
            self.fail(key, "is missing.")
        return default

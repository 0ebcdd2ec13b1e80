"""The safetensors container: its header as a tensor index, bounds-checked, over a mapped file.

Knows nothing of models. Format: https://huggingface.co/docs/safetensors.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from octavo.checkpoint.mapped_file import MappedFile
from octavo.checkpoint.model_config import TensorInfo
from octavo.errors import CheckpointError

__all__ = ["SafetensorsFile", "parse_json"]

HEADER_LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


def parse_json(path: Path, text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `text`; CheckpointError for anything else, however deeply nested."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {what} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {what} is not a JSON object.")
    return value


class SafetensorsFile:
    """One safetensors file: `tensors` by name. Every offset has been checked when the constructor returns."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError naming the file and the tensor at fault."""
        self.path = path
        self.file = MappedFile(path)
        if self.file.num_bytes < HEADER_LENGTH.size:
            raise CheckpointError(f"{path}: the file ends before its header. It is truncated or damaged.")
        (header_bytes,) = HEADER_LENGTH.unpack_from(self.file.buffer)
        left = self.file.num_bytes - HEADER_LENGTH.size
        if header_bytes > min(left, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: the header's length is {header_bytes} bytes where the file has {left} left (limit "
                f"{MAX_HEADER_BYTES}). It is truncated, damaged or not a safetensors file."
            )
        data_start = HEADER_LENGTH.size + header_bytes
        header = parse_json(path, self.file.buffer[HEADER_LENGTH.size : data_start], "the header")
        header.pop("__metadata__", None)
        self.tensors: Mapping[str, TensorInfo] = {
            name: _read_entry(self.file, name, entry, data_start) for name, entry in header.items()
        }


def _read_entry(file: MappedFile, name: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"{file.path}: tensor {name[:200]!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} has no description in the header.")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where} has the unknown type {str(dtype)[:80]!r}; known: {', '.join(ITEM_BYTES)}.")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where} has the impossible shape {str(shape)[:80]}.")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has the impossible offsets {str(offsets)[:80]}.")
    start, end = offsets
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - start != num_bytes:
        raise CheckpointError(f"{where} has {end - start} bytes where {dtype} {shape} needs {num_bytes}.")
    if data_start + end > file.num_bytes:
        raise CheckpointError(
            f"{where} ends at byte {data_start + end} where the file has {file.num_bytes}. It is truncated or damaged."
        )
    return TensorInfo(
        name=name, shape=tuple(shape), dtype=dtype, path=file.path, offset=data_start + start, num_bytes=num_bytes
    )


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)

"""The GGUF container, versions 2 and 3, little-endian: key-value metadata and tensor index, bounds-checked.

Knows nothing of architectures or tokenizers; `gguf` gives the keys and tensors their meaning.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from octavo.checkpoint.mapped_file import MappedFile
from octavo.errors import CheckpointError

__all__ = ["GGML_TYPES", "GGMLType", "GGUFFile", "GGUFTensor"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 256
MAX_ARRAY_DEPTH = 3
STRING, ARRAY, BOOL = 8, 9, 7

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
SCALARS = {  # value type -> its layout, which is NumPy's name for it too
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", BOOL: "<B", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
SCALAR_STRUCTS = {value_type: struct.Struct(layout) for value_type, layout in SCALARS.items()}


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A tensor type: values come in blocks of `block_size`, `block_bytes` each."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the index. The shape is outermost first (the file has it innermost first)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    """Of the first byte in the file."""
    num_bytes: int


class GGUFFile:
    """One GGUF file: `metadata` by key, `tensors` by name.

    Metadata values are int, float, bool, str, list[str], or a NumPy array for a list of numbers.
    Every length and offset has been checked against the file's size when the constructor returns.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError naming the file and the key or tensor at fault."""
        self.file = MappedFile(path)
        cursor = _Cursor(self.file)
        num_tensors, num_keys = _read_header(cursor)
        self.version = cursor.version
        self.metadata: Mapping[str, Any] = _read_metadata(cursor, num_keys)
        self.tensors: Mapping[str, GGUFTensor] = _read_tensor_index(cursor, num_tensors, self._alignment())

    @property
    def path(self) -> Path:
        return self.file.path

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}, which is not a power of two.")
        return alignment


class _Cursor:
    """A position in the file, and what is being read there, for messages."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.buffer = file.buffer
        self.num_bytes = file.num_bytes
        self.position = 0
        self.version = 0
        self.item = "the header"

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {self.item} at byte {self.position}: {reason}")

    def require(self, num_bytes: int) -> None:
        left = self.num_bytes - self.position
        if num_bytes > left:
            self.fail(f"needs {num_bytes} bytes where the file has {left} left. It is truncated or damaged.")

    def unpack(self, layout: struct.Struct) -> Any:
        self.require(layout.size)
        (value,) = layout.unpack_from(self.buffer, self.position)
        self.position += layout.size
        return value

    def name(self) -> str:
        """A key or a tensor's name: short in every real file, so that a damaged length is noticed here."""
        start = self.position
        name = self.string()
        if self.position - start - U64.size > MAX_NAME_BYTES:
            self.fail(f"its name is longer than {MAX_NAME_BYTES} bytes. The file is damaged.")
        return name

    def string(self) -> str:
        num_bytes = self.unpack(U64)
        self.require(num_bytes)
        start = self.position
        self.position += num_bytes
        return self.buffer[start : self.position].decode("utf-8", "replace")

    def value(self, value_type: int, depth: int = 0) -> Any:
        if value_type == STRING:
            return self.string()
        if value_type == ARRAY:
            return self._array(depth + 1)
        layout = SCALAR_STRUCTS.get(value_type)
        if layout is None:
            self.fail(f"unknown value type {value_type}.")
        value = self.unpack(layout)
        return value != 0 if value_type == BOOL else value

    def _array(self, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"arrays are nested more than {MAX_ARRAY_DEPTH} deep.")
        item_type, num_items = self.unpack(U32), self.unpack(U64)
        if item_type == STRING:
            return self._strings(num_items)
        if item_type == ARRAY:
            self.require(num_items * (U32.size + U64.size))
            return [self._array(depth + 1) for _ in range(num_items)]
        if item_type not in SCALARS:
            self.fail(f"unknown value type {item_type} in an array.")
        dtype = np.dtype(SCALARS[item_type])
        self.require(num_items * dtype.itemsize)
        items = np.frombuffer(self.buffer, dtype, num_items, self.position).astype(dtype.newbyteorder("="))
        self.position += num_items * dtype.itemsize
        return items != 0 if item_type == BOOL else items

    def _strings(self, num_items: int) -> list[str]:
        """Vocabularies have hundreds of thousands of strings: one flat loop, everything in locals."""
        self.require(num_items * U64.size)
        buffer, last_start, limit, unpack = self.buffer, self.num_bytes - U64.size, self.num_bytes, U64.unpack_from
        end = self.position
        items: list[str] = []
        append = items.append
        for index in range(num_items):
            start = end + 8
            if end > last_start:
                self.fail(f"the file ends before string {index} of {num_items}. It is truncated or damaged.")
            end = start + unpack(buffer, end)[0]
            if end > limit:
                self.fail(f"the file ends within string {index} of {num_items}. It is truncated or damaged.")
            append(buffer[start:end].decode("utf-8", "replace"))
        self.position = end
        return items


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Number of tensors and of metadata keys."""
    if cursor.buffer[: len(MAGIC)] != MAGIC:
        raise CheckpointError(f"{cursor.path}: not a GGUF file: it doesn't begin with {MAGIC.decode()!r}.")
    cursor.position = len(MAGIC)
    cursor.version = cursor.unpack(U32)
    if cursor.version not in VERSIONS:
        if cursor.version & 0xFFFF == 0:
            cursor.fail("the file is big-endian, which is not supported.")
        cursor.fail(f"GGUF version {cursor.version} is not supported: versions {VERSIONS[0]} and {VERSIONS[1]} are.")
    num_tensors, num_keys = cursor.unpack(U64), cursor.unpack(U64)
    cursor.require(num_keys * (U64.size + U32.size + 1) + num_tensors * (2 * U64.size + 2 * U32.size))
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        cursor.item = f"metadata entry {index} of {num_keys}"
        key = cursor.name()
        cursor.item = f"metadata key {key!r}"
        if key in metadata:
            cursor.fail("the key appears twice.")
        metadata[key] = cursor.value(cursor.unpack(U32))
    return metadata


def _read_tensor_index(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    """The file's offsets count from the end of the index, rounded up: known only once all entries are read."""
    entries: dict[str, tuple[tuple[int, ...], GGMLType, int]] = {}
    for index in range(num_tensors):
        cursor.item = f"tensor {index} of {num_tensors}"
        name = cursor.name()
        cursor.item = f"tensor {name!r}"
        if name in entries:
            cursor.fail("the tensor appears twice.")
        num_dimensions = cursor.unpack(U32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            cursor.fail(f"it has {num_dimensions} dimensions, outside 1 to {MAX_DIMENSIONS}.")
        shape = tuple(cursor.unpack(U64) for _ in range(num_dimensions))[::-1]
        type_id = cursor.unpack(U32)
        if type_id not in GGML_TYPES:
            cursor.fail(f"GGML type {type_id} is not known.")
        entries[name] = (shape, GGML_TYPES[type_id], cursor.unpack(U64))
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, (shape, ggml_type, offset) in entries.items():
        cursor.item, cursor.position = f"tensor {name!r}", data_start + offset
        if min(shape) < 1 or shape[-1] % ggml_type.block_size:
            cursor.fail(f"shape {list(shape)} is not possible for {ggml_type.name}: blocks of {ggml_type.block_size}.")
        if offset % alignment:
            cursor.fail(f"its offset {offset} is not a multiple of the file's alignment, {alignment}.")
        num_bytes = math.prod(shape) // ggml_type.block_size * ggml_type.block_bytes
        cursor.require(num_bytes)
        tensors[name] = GGUFTensor(name, shape, ggml_type, data_start + offset, num_bytes)
    return tensors

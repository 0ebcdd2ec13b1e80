"""PackedFile: tensors by key in one file, checked by checksums when they are read. Knows neither models nor packing.

The file: a preamble (magic, sizes, CRC-32 of the index), the index as JSON, then each tensor at a multiple of 64 bytes.
"""

import contextlib
import fcntl
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.kernels.quantized import QuantizedForm

__all__ = ["DamagedFileError", "PackedTensor", "read_index", "read_tensors", "tensor_bytes", "write_packed"]

MAGIC = b"octavoW1"
PREAMBLE = struct.Struct("<8sQQI")  # magic, bytes of the index, bytes of the file, CRC-32 of the index
ALIGNMENT = 64
READ_BYTES = 4 << 20
"""Read, then checked, while they are in a core's cache."""


class DamagedFileError(ValueError):
    """Not a packed file, cut short, or not the bytes that were written."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    data: torch.Tensor
    form: QuantizedForm | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    dtype: str
    shape: list[int]
    form: list[Any] | None
    offset: int
    """From the first tensor's place."""
    num_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class _Index:
    label: str
    entries: list[_Entry]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def write_packed(path: Path, label: str, tensors: Mapping[str, PackedTensor]) -> int:
    """Write the file under another name, then give it its own. Returns its size; 0 where another process is writing it.

    Raises OSError. What a process that was killed left behind is written over by the next.
    """
    part = path.with_name(path.name + ".part")
    with open(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), part.stat()):
                return 0  # it was given its name between opening and locking
        except (BlockingIOError, FileNotFoundError):
            return 0
        try:
            num_bytes = _write(file.fileno(), label, tensors)
            os.fsync(file.fileno())
            part.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    return num_bytes


def _write(file: int, label: str, tensors: Mapping[str, PackedTensor]) -> int:
    entries: list[_Entry] = []
    offset = 0
    for key, tensor in tensors.items():
        data = tensor_bytes(tensor.data)
        dtype, form = _name(tensor.data.dtype), _form_to_json(tensor.form)
        entries.append(_Entry(key, dtype, list(tensor.data.shape), form, offset, len(data), zlib.crc32(data)))
        offset = _aligned(offset + len(data))
    index = json.dumps(asdict(_Index(label, entries))).encode()
    start = _aligned(PREAMBLE.size + len(index))
    size = start + offset
    os.ftruncate(file, 0)
    os.ftruncate(file, size)
    _write_at(file, memoryview(PREAMBLE.pack(MAGIC, len(index), size, zlib.crc32(index)) + index), 0)
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        _write_at(file, tensor_bytes(tensor.data), start + entry.offset)
    return size


def read_index(file: int) -> _Index:
    """What the open file holds; read_tensors takes it. Raises DamagedFileError, OSError."""
    preamble = os.pread(file, PREAMBLE.size, 0)
    if len(preamble) < PREAMBLE.size:
        raise DamagedFileError("it ends in its preamble")
    magic, index_bytes, size, crc = PREAMBLE.unpack(preamble)
    if magic != MAGIC:
        raise DamagedFileError("it does not begin as one")
    actual = os.fstat(file).st_size
    if size != actual or index_bytes > actual:
        raise DamagedFileError(f"it has {actual} bytes instead of {size}")
    index = os.pread(file, index_bytes, PREAMBLE.size)
    if zlib.crc32(index) != crc:
        raise DamagedFileError("its index does not have its checksum")
    fields = json.loads(index)
    return _Index(fields["label"], [_Entry(**entry) for entry in fields["entries"]])


def read_tensors(file: int, index: _Index, num_threads: int) -> dict[str, PackedTensor]:
    """Every tensor, in one piece of memory on huge pages where there are any. Raises DamagedFileError, OSError."""
    file_bytes = os.fstat(file).st_size
    start = file_bytes - _aligned(max(entry.offset + entry.num_bytes for entry in index.entries))
    pages = mmap.mmap(-1, file_bytes - start, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(pages)

    def read(entry: _Entry) -> PackedTensor:
        data = memory[entry.offset : entry.offset + entry.num_bytes]
        _read_at(file, data, start + entry.offset, entry)
        tensor = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, entry.dtype)).view(entry.shape)
        return PackedTensor(tensor, _form_from_json(entry.form))

    with ThreadPoolExecutor(num_threads) as threads:
        tensors = list(threads.map(read, index.entries))
    return {entry.key: tensor for entry, tensor in zip(index.entries, tensors, strict=True)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _form_to_json(form: QuantizedForm | None) -> list[Any] | None:
    return None if form is None else [form.bits, form.group, form.zero, form.has_mins, _name(form.scale_dtype)]


def _form_from_json(form: list[Any] | None) -> QuantizedForm | None:
    if form is None:
        return None
    bits, group, zero, has_mins, scale_dtype = form
    return QuantizedForm(bits, group, zero, has_mins, getattr(torch, scale_dtype))


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        num_bytes = os.pwrite(file, data, offset)
        data, offset = data[num_bytes:], offset + num_bytes


def _read_at(file: int, data: memoryview, offset: int, entry: _Entry) -> None:
    crc = 0
    while data:
        num_bytes = os.preadv(file, [data[:READ_BYTES]], offset)
        if not num_bytes:
            raise DamagedFileError("it has been cut short")
        crc = zlib.crc32(data[:num_bytes], crc)
        data, offset = data[num_bytes:], offset + num_bytes
    if crc != entry.crc:
        raise DamagedFileError(f"{entry.key[:100]} does not have its checksum")

"""TierFile: the KV cache's second tier on the CPU, a file. Each layer's blocks in it follow the pool's in memory.

A layer's cache is one range of addresses: the pool's blocks in anonymous memory, then the tier's, mapped from the file
to be read only. Kernels see one array of blocks. Writes go through `pwrite`, so that a full disk is an error and not a
signal; copies back into the pool go through `pread` for the same reason, and are checked.

The file: a header page (`TierLayout`), a CRC-32 for each block over its bytes in all layers, then one region a layer.
It has mode 0600 and no name: it is gone with the process. Version and checksums let a later release keep it.
"""

import errno
import json
import logging
import mmap
import os
import secrets
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.devices.cpu import _cpu
from octavo.devices.device import CopyResult
from octavo.errors import ConfigError

__all__ = ["TierFile", "TierLayout"]

MAGIC = b"octavoKV"
VERSION = 1
logger = logging.getLogger(__name__)

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
CHECKSUM_BYTES = 4
ALIGNMENT = 64
"""What the kernels want of a block's address."""
MADV_POPULATE_READ = 22


@dataclass(frozen=True, slots=True)
class TierLayout:
    """Whatever two files must agree in for the blocks of one to be of use in the other; the header holds it as JSON."""

    num_blocks: int
    block_size: int
    dtype: str
    layer_block_bytes: tuple[int, ...]
    """Bytes of a block in each cache: one a layer, or for layers that share it."""
    version: int = VERSION

    @property
    def block_bytes(self) -> int:
        return sum(self.layer_block_bytes)

    @property
    def checksums_offset(self) -> int:
        return PAGE_BYTES

    def region_offsets(self) -> list[int]:
        """Where each layer's region begins in the file, and at the end its size."""
        offsets = [_round_up(self.checksums_offset + self.num_blocks * CHECKSUM_BYTES)]
        for num_bytes in self.layer_block_bytes:
            offsets.append(_round_up(offsets[-1] + self.num_blocks * num_bytes))
        return offsets

    def header(self) -> bytes:
        text = MAGIC + json.dumps(asdict(self)).encode()
        if len(text) > PAGE_BYTES:
            raise ConfigError(f"The tier's header takes {len(text)} bytes of {PAGE_BYTES}: too many layers.")
        return text.ljust(PAGE_BYTES, b"\0")


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class TierFile:
    """Invariant: the first `num_pool_blocks` ids are the pool's, the others the file's, in every layer."""

    def __init__(self, folder: str, layout: TierLayout, num_pool_blocks: int) -> None:
        """Raises ConfigError where the platform or the folder can't hold a tier."""
        if sys.platform != "linux" or sys.maxsize < 2**63 - 1:
            raise ConfigError("--swap-space and --num-swap-blocks need 64-bit Linux on the CPU. Leave them out.")
        if any(num_bytes % ALIGNMENT for num_bytes in layout.layer_block_bytes):
            raise ConfigError(f"--swap-space: this KV cache's blocks are not multiples of {ALIGNMENT} bytes.")
        self.layout = layout
        self.num_pool_blocks = num_pool_blocks
        self._offsets = layout.region_offsets()
        self._file = _open_unnamed(folder)
        try:
            os.ftruncate(self._file, self._offsets[-1])
            os.pwrite(self._file, layout.header(), 0)
        except OSError as error:
            raise _refusal(folder, error) from None
        self._has_warned = False
        self._checksums: dict[int, int] = {}
        self._pages: list[mmap.mmap] = []
        self._starts: list[int] = []  # of each layer's blocks in its pages
        self._views: list[memoryview] = []
        for layer in range(len(layout.layer_block_bytes)):
            self._map(layer)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)  # the mapping outlives it

    def _map(self, layer: int) -> None:
        """Reserve memory for the layer's pool and tier, and put the file in place of the latter."""
        block_bytes = self.layout.layer_block_bytes[layer]
        pool_bytes, tier_bytes = self.num_pool_blocks * block_bytes, self.layout.num_blocks * block_bytes
        tier_start = _round_up(pool_bytes)
        pages = mmap.mmap(-1, tier_start + _round_up(tier_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # as `zeros_on_demand` does
            pages.madvise(mmap.MADV_HUGEPAGE)
        try:
            _cpu.map_file(pages, tier_start, _round_up(tier_bytes), self._file, self._offsets[layer])
        except OSError as error:
            raise ConfigError(f"--kv-cache-dir: its file can't be mapped: {error.strerror}.") from None
        self._pages.append(pages)
        self._starts.append(tier_start - pool_bytes)
        self._views.append(memoryview(pages)[self._starts[layer] :])

    def cache(self, layer: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The layer's cache: pool and tier, [num_pool_blocks + num_blocks, ...]. The tier's part can only be read."""
        num_bytes = shape[0] * self.layout.layer_block_bytes[layer]
        return torch.frombuffer(self._views[layer][:num_bytes], dtype=torch.uint8).view(dtype).view(tuple(shape))

    def copy(self, copies: Sequence[tuple[int, int]]) -> CopyResult:
        """Copy blocks (source, destination) in order, each between the pool and the file."""
        start = time.perf_counter()
        failed = []
        for index, (source, destination) in enumerate(copies):
            try:
                if destination >= self.num_pool_blocks:
                    self._write(source, destination - self.num_pool_blocks)
                else:
                    self._read(source - self.num_pool_blocks, destination)
            except OSError as error:
                failed.append(index)
                self._warn(error)
        return CopyResult(failed, time.perf_counter() - start)

    def _warn(self, error: OSError) -> None:
        """Once: what follows is likely to fail in the same way."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The KV cache's tier (--kv-cache-dir) has failed: %s. Preempted requests are recomputed from now on.",
                error.strerror or error,
            )

    def measure(self) -> float:
        """Bytes a second that are copied to the file and back. Raises ConfigError where they can't be."""
        there_and_back = [(0, self.num_pool_blocks), (self.num_pool_blocks, 0)]
        results = [self.copy(there_and_back) for _ in range(3)]
        if any(result.failed for result in results):
            raise ConfigError("The tier's file can't be written to. Choose another --kv-cache-dir.")
        return 2 * self.layout.block_bytes / min(result.seconds for result in results)

    def _parts(self, pool_block: int, tier_block: int) -> list[tuple[memoryview, int]]:
        """A block's bytes in the pool and its place in the file, a layer each."""
        return [
            (view[pool_block * size : (pool_block + 1) * size], offset + tier_block * size)
            for view, offset, size in zip(self._views, self._offsets, self.layout.layer_block_bytes, strict=False)
        ]

    def _write(self, pool_block: int, tier_block: int) -> None:
        checksum = 0
        for part, offset in self._parts(pool_block, tier_block):
            checksum = zlib.crc32(part, checksum)
            _write_at(self._file, part, offset)
        self._checksums[tier_block] = checksum
        place = self.layout.checksums_offset + tier_block * CHECKSUM_BYTES
        _write_at(self._file, memoryview(checksum.to_bytes(CHECKSUM_BYTES, "little")), place)

    def _read(self, tier_block: int, pool_block: int) -> None:
        checksum = 0
        for part, offset in self._parts(pool_block, tier_block):
            _read_at(self._file, part, offset)
            checksum = zlib.crc32(part, checksum)
        if checksum != self._checksums.get(tier_block):
            raise OSError(f"block {tier_block} of the tier's file does not have the checksum it was written with")

    def populate(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Bring those of the blocks that lie in the file, and that attention is about to read, into memory, so that a
        disk that fails raises OSError here instead of a signal there. Linux before 5.14 can't, and goes on without."""
        block_ids = np.unique(block_ids[block_ids >= self.num_pool_blocks])
        for first, last in _runs(block_ids.tolist()):
            for pages, start, size in zip(self._pages, self._starts, self.layout.layer_block_bytes, strict=True):
                begin = (start + first * size) // PAGE_BYTES * PAGE_BYTES
                try:
                    pages.madvise(MADV_POPULATE_READ, begin, start + last * size - begin)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise


def _open_unnamed(folder: str) -> int:
    """A new file of mode 0600 without a name."""
    path = os.path.join(folder, f"octavo-kv-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    except OSError as error:
        raise _refusal(folder, error) from None
    return file


def _refusal(folder: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"The tier's file can't be made in {folder}: {error.strerror}. Choose another --kv-cache-dir, or a smaller "
        "--swap-space or --num-swap-blocks."
    )


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        num_bytes = os.pwrite(file, data, offset)
        data, offset = data[num_bytes:], offset + num_bytes


def _read_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        num_bytes = os.preadv(file, [data], offset)
        if not num_bytes:
            raise OSError("the tier's file has been cut short")
        data, offset = data[num_bytes:], offset + num_bytes


def _runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted ids as ranges [first, last)."""
    runs: list[tuple[int, int]] = []
    for block_id in block_ids:
        if runs and runs[-1][1] == block_id:
            runs[-1] = (runs[-1][0], block_id + 1)
        else:
            runs.append((block_id, block_id + 1))
    return runs

"""WeightCache: packed weights kept in a file, for the next start of the same model in the same format.

Owns where the file is, when it is valid and whether it pays; `packed_file` knows what is in it.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import octavo
from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.content_digest import content_digest
from octavo.kernels.ops import Ops
from octavo.kernels.quantized import QuantizedMatrix
from octavo.layers.gguf_blocks import QUANTIZED_TYPES
from octavo.layers.packed_file import (
    DamagedFileError,
    PackedTensor,
    read_index,
    read_tensors,
    tensor_bytes,
    write_packed,
)

__all__ = ["WeightCache"]

VERSION = 1
"""Of what is packed how, as far as a change shows neither in octavo's version nor in the probe's packing."""
WORTH_BYTES = 16 << 20
WORTH_SECONDS = 0.5
"""auto: smaller weights, and those packed sooner, are not kept."""
PROBE_SHAPE = (64, 512)
"""Whole tiles in every layout: no padding, whose bytes might be any."""

logger = logging.getLogger(__name__)


class WeightCache:
    """Filled from the file if it is valid, else by `put`; `save` then writes the file.

    Invariant: every tensor held is what packing the checkpoint's content gives in this format.
    """

    def __init__(
        self,
        setting: str,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        quantization: str,
        int8_activations: bool,
        num_threads: int,
    ) -> None:
        """setting: auto, or the folder of --weight-cache. Reads the file where there is one; warns if it is damaged."""
        self._setting = setting
        self._checkpoint = checkpoint
        self._num_threads = num_threads
        self._stamp = _stamp(checkpoint)
        self._format = _format(ops, dtype, quantization, int8_activations)
        self._digest = ""
        self._seconds = 0.0
        self._misses = False
        self._tensors: dict[str, PackedTensor] = {}
        self.path: Path | None = next((path for path in self._places() if path.exists()), None)
        """The file that weights were taken from."""
        if self.path is None or not self._read(self.path):
            self.path = None

    def take(self, key: str) -> PackedTensor | None:
        return self._tensors.get(key)

    def put(self, key: str, tensor: PackedTensor, seconds: float) -> None:
        """Hold what took so long to read and pack."""
        self._tensors[key] = tensor
        self._seconds += seconds
        self._misses = True

    def save_in_background(self, on_saved: Callable[[Path, int], None]) -> threading.Thread | None:
        """Write what was not in the file, if it pays; `on_saved` gets the path and the size.

        A process that ends meanwhile is not held up. A failure is one warning.
        """
        if not self._misses:
            self._forget()
            return None
        thread = threading.Thread(target=self._save, args=(on_saved,), name="weight-cache", daemon=True)
        thread.start()
        return thread

    def _places(self) -> list[Path]:
        """Where the file may be, the best place first."""
        path, name_format = self._checkpoint.path, _hash(self._format)[:12]
        elsewhere = f"{path.stem}-{_hash(str(path.absolute()))[:12]}-{name_format}.packed"
        if self._setting != "auto":
            return [Path(self._setting).expanduser() / elsewhere]
        beside = path if path.is_dir() else path.parent
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
        return [beside / f"{path.stem}-{name_format}.packed", user / elsewhere]

    def _read(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                index = read_index(file.fileno())
                self._digest = content_digest(self._checkpoint, self._num_threads)
                if index.label != self._label():
                    return False
                self._tensors = read_tensors(file.fileno(), index, self._num_threads)
        except (DamagedFileError, OSError) as error:
            logger.warning("The packed weights in %s can't be used: %s. They are packed again.", path, error)
            return False
        return True

    def _label(self) -> str:
        return f"{self._format} {self._digest}"

    def _save(self, on_saved: Callable[[Path, int], None]) -> None:
        path, num_bytes = self._write() if self._pays() else (None, 0)
        self._forget()
        if path is not None:
            on_saved(path, num_bytes)

    def _write(self) -> tuple[Path | None, int]:
        """The file and its size; None where it can't be written, or another process is writing it."""
        reason: OSError | None = None
        for path in self._places():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                num_bytes = write_packed(path, self._label(), self._tensors)
                return (path, num_bytes) if num_bytes else (None, 0)
            except OSError as error:  # the next place may do
                reason = error
        logger.warning("The packed weights can't be kept (--weight-cache): %s.", reason)
        return None, 0

    def _pays(self) -> bool:
        """Whether what is held is worth a file: in auto, if it took more than twice as long as reading it back will."""
        start = time.perf_counter()
        num_bytes = sum(tensor.data.nbytes for tensor in self._tensors.values())
        if self._setting == "auto" and (num_bytes < WORTH_BYTES or self._seconds < WORTH_SECONDS):
            return False
        self._digest = self._digest or content_digest(self._checkpoint, self._num_threads)
        if _stamp(self._checkpoint) != self._stamp:
            return False  # changed while it was loaded: what is packed may be neither
        if self._setting != "auto":
            return True
        seconds = time.perf_counter() - start
        hashed_bytes = sum(tensor.num_bytes for tensor in self._checkpoint.tensors.values())
        return self._seconds > 2 * seconds * (1 + num_bytes / hashed_bytes)

    def _forget(self) -> None:
        """The model holds the weights that it uses; the checkpoint's files need not stay mapped."""
        self._tensors = {}
        del self._checkpoint


def _stamp(checkpoint: Checkpoint) -> list[tuple[str, int, int]]:
    paths = sorted({tensor.path for tensor in checkpoint.tensors.values()})
    stats = [(path, path.stat()) for path in paths if path.exists()]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _format(ops: Ops, dtype: torch.dtype, quantization: str, int8_activations: bool) -> str:
    """Whatever decides how weights of the same content are packed; the layouts are recognised by packing a probe."""
    probe = torch.arange(PROBE_SHAPE[0] * PROBE_SHAPE[1])
    layouts = hashlib.sha256(tensor_bytes(ops.pack((probe % 251).view(PROBE_SHAPE).to(dtype)).data))
    for form in dict.fromkeys(block_type.form for block_type in QUANTIZED_TYPES.values()):
        values = (probe % 251 % (1 << form.bits)).to(torch.uint8).view(PROBE_SHAPE)
        scales = (probe[: PROBE_SHAPE[0] * PROBE_SHAPE[1] // form.group] % 127).to(form.scale_dtype)
        scales = scales.view(PROBE_SHAPE[0], -1)
        matrix = QuantizedMatrix(form, values, scales, scales + 1 if form.has_mins else None)
        layouts.update(tensor_bytes(ops.pack_quantized(matrix, int8_activations).data))
    return json.dumps([octavo.__version__, VERSION, ops.name, quantization, str(dtype), layouts.hexdigest()])

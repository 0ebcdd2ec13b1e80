"""content_digest: what a checkpoint's weights are, whatever its files' names and dates."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.model_config import TensorInfo

__all__ = ["content_digest"]


def content_digest(checkpoint: Checkpoint, num_threads: int, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256, in hexadecimal, over every tensor's name, type, shape, order of rows and bytes.

    Tensors are hashed side by side, the largest first; `on_bytes` is told of each in the calling thread.
    """

    def digest(tensor: TensorInfo) -> bytes:
        place = (tensor.name, tensor.dtype, tensor.shape, tensor.rope_interleaved_heads)
        return hashlib.sha256(
            repr(place).encode() + hashlib.sha256(checkpoint.read(tensor.name).data).digest()
        ).digest()

    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: (-tensor.num_bytes, tensor.name))
    total = hashlib.sha256()
    with ThreadPoolExecutor(num_threads) as threads:
        for tensor, part in zip(tensors, threads.map(digest, tensors), strict=True):
            total.update(part)
            on_bytes(tensor.num_bytes)
    return total.hexdigest()

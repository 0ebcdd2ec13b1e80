"""content_digest: what a checkpoint's weights are, whatever its files' names and dates."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.model_config import TensorInfo

__all__ = ["content_digest"]


def content_digest(checkpoint: Checkpoint, num_threads: int) -> str:
    """SHA-256, in hexadecimal, over every tensor's name, type, shape, order of rows and bytes.

    Tensors are hashed side by side, the largest first.
    """

    def digest(tensor: TensorInfo) -> bytes:
        place = (tensor.name, tensor.dtype, tensor.shape, tensor.rope_interleaved_heads)
        return hashlib.sha256(
            repr(place).encode() + hashlib.sha256(checkpoint.read(tensor.name).data).digest()
        ).digest()

    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: (-tensor.num_bytes, tensor.name))
    with ThreadPoolExecutor(num_threads) as threads:
        return hashlib.sha256(b"".join(threads.map(digest, tensors))).hexdigest()

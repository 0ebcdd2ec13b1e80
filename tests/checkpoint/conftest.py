"""What the checkpoint tests share: the real SmolLM2 file."""

from pathlib import Path

import pytest

from tests.smollm2 import gguf_path


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    return Path(gguf_path())

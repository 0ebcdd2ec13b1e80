"""SmolLM2 behind the server, and clients that nobody here wrote, in environments of their own (`make test-clients`)."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import RunningServer
from tests.smollm2 import gguf_path

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-clients"
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    options = ["--served-model-name", MODEL, "--port", "0", "--max-model-len", "2048", "--access-log=off"]
    with RunningServer("octavo", "serve", gguf_path(), *options) as running:
        yield running.wait_ready()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer as a Hugging Face folder, which these clients read."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    path = Path(gguf_path())
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    return folder


def run(environment: str, program: str, *arguments: str) -> str:
    """What a client prints; fails with it if the client does."""
    command = [str(ENVIRONMENTS / environment / "bin" / program), *arguments]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout

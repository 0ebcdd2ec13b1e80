"""One scripted server for all tests that leave it running."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.running import RunningServer, make_tokenizer_folder, scripted


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def server(tokenizer_folder: Path) -> Iterator[RunningServer]:
    with scripted(tokenizer_folder) as running:
        yield running.wait_ready()


@pytest.fixture(scope="session")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client

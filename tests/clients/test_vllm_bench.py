"""`vllm bench serve`, in its completions and its chat form."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, run
from tests.server.running import RunningServer

pytestmark = pytest.mark.clients


@pytest.mark.parametrize(("backend", "endpoint"), [("openai", "completions"), ("openai-chat", "chat/completions")])
def test_every_request_of_vllm_bench_serve_succeeds(
    server: RunningServer, tokenizer_folder: Path, tmp_path: Path, backend: str, endpoint: str
) -> None:
    where = ["--backend", backend, "--base-url", server.url, "--endpoint", f"/v1/{endpoint}"]
    model = ["--model", MODEL, "--tokenizer", str(tokenizer_folder)]
    load = ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32", "--num-prompts", "32"]
    result = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    run("vllm", "vllm", "bench", "serve", *where, *model, *load, "--ignore-eos", *result)
    report = json.loads((tmp_path / "result.json").read_text())
    assert (report["completed"], report["failed"]) == (32, 0)
    assert report["total_output_tokens"] == 32 * 32

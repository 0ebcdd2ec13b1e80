"""What both processes of the server take together."""

from pathlib import Path

import httpx
import pytest

from octavo.layers.weights import packed_bytes
from octavo.models.loader import open_checkpoint
from octavo.plan.memory import kv_bytes_per_token
from tests.server.running import RunningServer
from tests.smollm2 import gguf_path

MODULE = "octavo.entrypoints.openai.api_server"
BESIDE_BYTES = 400_000_000
NUM_TOKENS = 1000


def proportional_set_size(pid: int) -> int:
    """Pages that processes share count in parts."""
    (line,) = [x for x in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if x.startswith("Pss:")]
    return int(line.split()[1]) * 1024


def total_after_a_request() -> int:
    with RunningServer(MODULE, "--model", gguf_path(), "--port", "0") as server:
        server.wait_ready()
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": gguf_path(), "prompt": [5] * (NUM_TOKENS - 20), "max_tokens": 20, "ignore_eos": True},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        return sum(map(proportional_set_size, (server.process.pid, server.engine.pid)))


@pytest.mark.slow
def test_both_processes_take_little_beside_weights_and_kv() -> None:
    checkpoint = open_checkpoint(gguf_path())
    weights = sum(packed_bytes(tensor) for tensor in checkpoint.tensors.values())
    kv = NUM_TOKENS * kv_bytes_per_token(checkpoint.config, "bfloat16")
    assert total_after_a_request() <= weights + kv + BESIDE_BYTES

"""Minutes of mixed traffic: no server error, flat memory, counters that add up.

`OCTAVO_SOAK_SECONDS` sets how long; 600 unless given.
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.running import RunningServer
from tests.server.test_load import check_counters
from tests.server.test_metrics import scrape
from tests.tiny_models import make_folder

SECONDS = float(os.environ.get("OCTAVO_SOAK_SECONDS", "600"))
NUM_WORKERS = 24
WARM_UP = 0.4
"""Share of the time after which memory is to stay what it is."""
MAX_GROWTH = 0.05
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "wizards", "box"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
REFUSED = [
    (TEXT, b'{"prompt": '),
    (TEXT, b'{"prompt": "x", "temperature": "hot"}'),
    (TEXT, b'{"prompt": [99999999]}'),
    (TEXT, b'{"prompt": "x", "stop_token_ids": [-1]}'),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"a": 1}}'),
    (CHAT, b'{"messages": 5, "stream": true}'),
    ("/tokenize", b"[]"),
    ("/nothing", b"{}"),
]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[RunningServer]:
    """A small pool, so that requests are preempted too."""
    folder = make_folder(tmp_path)
    options = ["--dtype", "float32", "--max-num-seqs", "12", "--kv-cache-memory-bytes", "1M", "--num-threads", "1"]
    arguments = ["--model", str(folder), "--port", "0", "--served-model-name", "scripted", "--access-log=off"]
    with RunningServer("octavo.entrypoints.openai.api_server", *arguments, *options) as server:
        yield server.wait_ready()


class Traffic:
    """What one worker sends, at random but the same for the same seed; statuses are counted."""

    def __init__(self, url: str, seed: int, statuses: Counter[int]) -> None:
        self.rng = random.Random(seed)
        self.statuses = statuses
        self.http = httpx.AsyncClient(base_url=url, timeout=120)

    async def run(self, until: float) -> None:
        actions = [self.complete, self.stream, self.leave, self.refused, self.look, self.constrained, self.long]
        async with self.http:
            while time.monotonic() < until:
                await self.rng.choices(actions, [5, 6, 4, 4, 3, 2, 1])[0]()

    def prompt(self, num_words: int) -> str:
        # Few beginnings, so that the prefix cache has hits.
        return " ".join([WORDS[self.rng.randrange(3)] * 4, *self.rng.choices(WORDS, k=num_words)])

    def request(self, num_words: int, max_tokens: int) -> tuple[str, dict[str, Any]]:
        rng, text = self.rng, self.prompt(num_words)
        fields: dict[str, Any] = {"max_tokens": rng.randint(1, max_tokens), "n": rng.choice([1, 1, 1, 2])}
        fields |= rng.choice([{}, {"temperature": 0}, {"seed": 5, "top_p": 0.8}, {"presence_penalty": 1.0}])
        fields |= rng.choice([{}, {}, {"stop": ["e", "qu"]}, {"ignore_eos": True}])
        if rng.random() < 0.5:
            return TEXT, fields | {"prompt": text} | rng.choice([{}, {"logprobs": 3}])
        messages = [{"role": "user", "content": text}]
        return CHAT, fields | {"messages": messages} | rng.choice([{}, {"logprobs": True, "top_logprobs": 2}])

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        response = await self.http.post(path, json=body)
        self.statuses[response.status_code] += 1
        assert response.status_code == 200, response.text
        return response

    async def complete(self) -> None:
        await self.post(*self.request(12, 40))

    async def long(self) -> None:
        await self.post(*self.request(60, 120))
        path, body = self.request(600, 20)
        response = await self.http.post(path, json=body)
        self.statuses[response.status_code] += 1
        assert response.status_code == 400

    async def stream(self) -> None:
        path, body = self.request(12, 40)
        response = await self.post(path, body | {"stream": True})
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text

    async def leave(self) -> None:
        path, body = self.request(12, 120)
        body |= {"ignore_eos": True}
        if self.rng.random() < 0.5:
            with contextlib.suppress(httpx.TimeoutException):
                await self.http.post(path, json=body, timeout=self.rng.uniform(0.001, 0.3))
            return
        async with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            lines = response.aiter_lines()
            for _ in range(self.rng.randint(1, 10)):
                await anext(lines, None)

    async def refused(self) -> None:
        path, content = self.rng.choice(REFUSED)
        response = await self.http.post(path, content=content, headers={"Content-Type": "application/json"})
        self.statuses[response.status_code] += 1
        assert response.status_code in (400, 404)
        assert response.json()["error"]["message"]

    async def constrained(self) -> None:
        body = {"prompt": self.prompt(5), "max_tokens": 60, "structured_outputs": {"json": SCHEMA}}
        if self.rng.random() < 0.3:
            body["structured_outputs"] = {"regex": "(a{1000}){1000}"}
        response = await self.http.post(TEXT, json=body)
        self.statuses[response.status_code] += 1
        assert response.status_code in (200, 400)

    async def look(self) -> None:
        path = self.rng.choice(["/health", "/livez", "/v1/models", "/version", "/openapi.json"])
        response = await self.http.get(path)
        assert response.status_code == 200, response.text
        await self.post("/tokenize", {"prompt": self.prompt(20)})
        await self.http.post("/v1/embeddings", json={"input": "x"})  # this model can't: refused


def memory_bytes(server: RunningServer) -> list[int]:
    """Of the API process and the engine's."""
    return [process.memory_info().rss for process in (psutil.Process(server.process.pid), server.engine)]


async def look_on(server: RunningServer, until: float) -> list[list[int]]:
    """Scrape all the while; returns what memory was in use, second by second."""
    memory = []
    with httpx.Client(base_url=server.url, timeout=30) as http:
        while time.monotonic() < until:
            check_counters(await asyncio.to_thread(scrape, http))
            memory.append(memory_bytes(server))
            await asyncio.sleep(1)
    return memory


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
async def test_mixed_traffic_for_minutes(tiny: RunningServer) -> None:
    until = time.monotonic() + SECONDS
    statuses: Counter[int] = Counter()
    workers = [Traffic(tiny.url, seed, statuses).run(until) for seed in range(NUM_WORKERS)]
    memory, *_ = await asyncio.gather(look_on(tiny, until), *workers)
    assert statuses[200] > SECONDS
    assert not [status for status in statuses if status >= 500]
    settled = memory[int(len(memory) * WARM_UP) :]
    third = len(settled) // 3
    for name, series in zip(("API", "engine"), zip(*settled, strict=True), strict=True):
        first, last = max(series[:third]), max(series[-third:])
        print(f"{name}: {first >> 20} MiB, then {last >> 20} MiB")
        assert last < first * (1 + MAX_GROWTH), name
    with httpx.Client(base_url=tiny.url) as http:
        deadline = time.monotonic() + 10
        while (values := scrape(http))["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]:
            assert time.monotonic() < deadline
        check_counters(values)
        assert values["vllm:kv_cache_usage_perc"] == 0
        assert values["vllm:request_success_total[error]"] == 0
        print(dict(statuses), {name: value for name, value in values.items() if "total" in name})

"""A queue that is full refuses at once, with when to come back, and serves those that it took."""

import asyncio
from pathlib import Path

import httpx

from tests.server.running import scripted


async def until(client: httpx.AsyncClient, name: str, value: int) -> None:
    wanted = f'vllm:{name}{{model_name="scripted"}} {value}.0'
    while wanted not in (await client.get("/metrics")).text:
        await asyncio.sleep(0.01)


async def test_a_full_queue_refuses_with_429_and_retry_after_and_answers_the_others(tokenizer_folder: Path) -> None:
    options = ("--max-num-seqs", "2", "--max-num-queued-reqs", "4")
    with scripted(tokenizer_folder, *options) as server:
        async with httpx.AsyncClient(base_url=server.wait_ready().url, timeout=30) as client:

            async def complete(max_tokens: int) -> httpx.Response:
                request = {"prompt": "a<slow>", "max_tokens": max_tokens, "ignore_eos": True}
                return await client.post("/v1/completions", json=request)

            async with asyncio.timeout(30):
                running = [asyncio.create_task(complete(60)) for _ in range(2)]
                await until(client, "time_to_first_token_seconds_count", 2)
                waiting = [asyncio.create_task(complete(1)) for _ in range(4)]
                await until(client, "num_requests_waiting", 4)
                refused = await complete(1)
                assert refused.status_code == 429
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                error = refused.json()["error"]
                assert "4 requests wait already and at most 4 may" in error["message"]
                assert "--max-num-queued-reqs" in error["message"]
                answers = await asyncio.gather(*running, *waiting)
                assert [answer.status_code for answer in answers] == [200] * 6
                assert (await complete(1)).status_code == 200

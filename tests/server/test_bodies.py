"""Who may hold memory for a body, and for how long."""

import asyncio
import json
import time
from pathlib import Path

import httpx
import psutil
import pytest

from octavo.server.http import bodies
from octavo.server.http.bodies import SLOW_AFTER_S, Room
from tests.server.running import scripted

TEXT = "/v1/completions"
HEADERS = {"Content-Type": "application/json"}
LIMIT = 1 << 20


async def test_room_is_given_in_turn_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ROOM_WAIT_S", 0.2)
    room = Room(100)
    first, second = await room.share(60), await room.share(40)
    with pytest.raises(TimeoutError):
        await room.share(1)
    waiting = asyncio.create_task(room.share(50))
    await asyncio.sleep(0.05)
    first.shrink(10)
    third = await waiting
    for share in (first, second, third):
        share.close()
        share.close()
    assert (room.num_bytes, room.shares) == (0, set())


def large(path: str, stream: bool, num_bytes: int = LIMIT - 100) -> bytes:
    body = {"prompt": "<slow>endless", "max_tokens": 300, "stream": stream}
    return json.dumps(body | {"user": "x" * (num_bytes - 80)}).encode()


async def test_large_requests_hold_room_only_until_they_are_parsed(tokenizer_folder: Path) -> None:
    """Twelve of them stream at once, though only eight may be read at a time; a new one is still taken."""
    options = ("--max-body-bytes", str(LIMIT), "--client-timeout", "20")
    with scripted(tokenizer_folder, *options) as server:
        async with httpx.AsyncClient(base_url=server.wait_ready().url, timeout=30) as client, asyncio.timeout(60):

            async def first_line() -> None:
                async with client.stream("POST", TEXT, content=large(TEXT, True), headers=HEADERS) as answer:
                    assert answer.status_code == 200
                    async for _ in answer.aiter_lines():
                        num_running.append(1)
                        break
                    while len(num_running) < 12:
                        await asyncio.sleep(0.01)

            num_running: list[int] = []
            await asyncio.gather(*(first_line() for _ in range(12)))

            # Uploads that stop before their end make way for others, and never keep small ones out.
            writers = []
            host, port = server.url.removeprefix("http://").split(":")
            body = large(TEXT, False)
            head = f"POST {TEXT} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            for _ in range(8):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head.encode() + body[:-5])
                writers.append((reader, writer))
            await asyncio.sleep(0.3)
            start = time.monotonic()
            small = await client.post(TEXT, json={"prompt": "<say>small"})
            assert small.json()["choices"][0]["text"] == "small"
            assert time.monotonic() - start < 1
            content = json.dumps({"prompt": "<say>large", "user": "x" * (LIMIT - 200)}).encode()
            answer = await client.post(TEXT, content=content, headers=HEADERS)
            assert answer.status_code == 200, answer.text
            assert time.monotonic() - start < SLOW_AFTER_S + 4
            refused = await asyncio.wait_for(
                asyncio.wait([asyncio.create_task(r.read(100)) for r, _ in writers], return_when="FIRST_COMPLETED"), 10
            )
            assert b" 503 " in next(iter(refused[0])).result()
            for _, writer in writers:
                writer.close()


async def test_work_ends_when_its_client_has_gone(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder) as server:
        server.wait_ready()
        host, port = server.url.removeprefix("http://").split(":")
        before = sum(p.memory_info().rss for p in psutil.Process(server.process.pid).children(recursive=True))
        body = json.dumps({"prompt": "x y" * 5_000_000}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(7):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body)
            await writer.drain()
            writer.close()
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client, asyncio.timeout(20):
            start = time.monotonic()
            content = json.dumps({"prompt": "<say>large", "user": "x" * (8 << 20)}).encode()
            answer = await client.post(TEXT, content=content, headers=HEADERS)
            assert answer.json()["choices"][0]["text"] == "large"
            assert time.monotonic() - start < 8  # it does not wait for the work that nobody wants
        children = psutil.Process(server.process.pid).children(recursive=True)
        after = sum(p.memory_info().rss for p in [psutil.Process(server.process.pid), *children])
        assert after - before < 1 << 30

"""A crowd, half of it slow and a quarter leaving at random, disturbs nobody and leaves nothing behind."""

import json
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.crowd import Client, Crowd, make_clients
from tests.server.running import RunningServer, scripted
from tests.server.test_metrics import scrape, scrape_idle

OPTIONS = ["--max-num-seqs", "256", "--max-model-len", "2k", "--access-log=off"]


def events_of(answer: bytes) -> list[dict[str, object]]:
    """The events of a chunked answer, less what differs from request to request."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
    *events, done, end = bytes(body).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events if not event.startswith(b":")]


def essence(answer: bytes) -> tuple[str, object, object]:
    """The text, how it ended and what it cost: how it was cut into events depends on who reads when."""
    events = events_of(answer)
    choices = [choice for event in events for choice in event["choices"]]  # type: ignore[attr-defined]
    usage = dict(events[-1]["usage"])  # type: ignore[call-overload]
    usage.pop("prompt_tokens_details")  # the second time the cache may know the prompt
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"], usage


async def undisturbed(crowd: Crowd, clients: list[Client]) -> list[tuple[str, object, object]]:
    """The same requests, one after the other."""
    answers = [(await crowd.run([Client(client.text)]))[0] for client in clients]
    return [essence(answer) for answer in answers if answer is not None]


async def check_crowd(server: RunningServer, num_clients: int, max_characters: int, num_compared: int) -> None:
    crowd, api = Crowd(server.url), psutil.Process(server.process.pid)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        await crowd.run(make_clients(20, max_characters, 0.001, seed=1))
        before, num_files, rss_bytes = scrape_idle(http), api.num_fds(), api.memory_info().rss
        clients = make_clients(num_clients, max_characters, 0.005, seed=2)
        answers = await crowd.run(clients)
        after = scrape_idle(http)
        assert api.memory_info().rss - rss_bytes < (20 << 20) + num_clients * (100 << 10)
        staying = [(client, answer) for client, answer in zip(clients, answers, strict=True) if answer is not None]
        assert len(staying) >= num_clients * 0.7
        for client, answer in staying:
            text, finish_reason, _ = essence(answer)
            assert (text, finish_reason) == (client.text, "stop")
        compared = staying[:: max(1, len(staying) // num_compared)]
        assert [essence(answer) for _, answer in compared] == await undisturbed(crowd, [c for c, _ in compared])

        change = {name: after[name] - before.get(name, 0) for name in after}
        finished = {reason: change[f"vllm:request_success_total[{reason}]"] for reason in ("stop", "abort", "error")}
        assert change["vllm:num_requests_total"] == sum(finished.values()) == num_clients
        assert finished["error"] == 0
        assert finished["stop"] >= len(staying)
        assert finished["abort"] > 0
        assert after["vllm:kv_cache_usage_perc"] == 0
        deadline = time.monotonic() + 5
        while api.num_fds() > num_files + 2:
            assert time.monotonic() < deadline
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(5) == 0  # a request that somebody still answers would hold it up


async def test_two_hundred_clients_disturb_nobody(tokenizer_folder: Path) -> None:
    with scripted(tokenizer_folder, *OPTIONS).wait_ready() as server:
        await check_crowd(server, num_clients=200, max_characters=200, num_compared=20)


@pytest.mark.slow
async def test_two_thousand_clients_disturb_nobody(tokenizer_folder: Path) -> None:
    queue = ["--max-num-queued-reqs", "2000"]
    with scripted(tokenizer_folder, *OPTIONS, *queue).wait_ready() as server:
        await check_crowd(server, num_clients=2000, max_characters=400, num_compared=200)


def test_counters_add_up_at_every_scrape_while_clients_leave(http: httpx.Client) -> None:
    before = scrape_idle(http)
    body = {"prompt": "<slow>x", "max_tokens": 60, "stream": True, "n": 3}
    for _ in range(12):
        with http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
            check_counters(scrape(http))
        check_counters(scrape(http))
    after = scrape_idle(http)
    check_counters(after)
    assert after["vllm:num_requests_total"] - before["vllm:num_requests_total"] == 36
    assert after["vllm:request_success_total[abort]"] - before["vllm:request_success_total[abort]"] == 36


def check_counters(values: dict[str, float]) -> None:
    finished = sum(value for name, value in values.items() if name.startswith("vllm:request_success_total["))
    unfinished = values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]
    assert values["vllm:num_requests_total"] == unfinished + finished

"""A client that goes away takes its request with it."""

import socket

import httpx
import pytest

from tests.server.running import RunningServer
from tests.server.test_metrics import scrape, scrape_idle
from tests.server.test_protocol import connected, post

TEXT = "/v1/completions"
ENDLESS = {"prompt": "<slow>without end", "max_tokens": 400}


def num_aborted(http: httpx.Client) -> float:
    return scrape_idle(http)["vllm:request_success_total[abort]"]


def wait_running(http: httpx.Client, count: int) -> None:
    while scrape(http)["vllm:num_requests_running"] != count:
        pass


def test_leaving_a_stream_aborts_its_request(http: httpx.Client) -> None:
    before = num_aborted(http)
    with http.stream("POST", TEXT, json=ENDLESS | {"stream": True, "n": 2}) as response:
        lines = response.iter_lines()
        next(lines)
    values = scrape_idle(http)
    assert values["vllm:request_success_total[abort]"] == before + 2
    assert values["vllm:kv_cache_usage_perc"] == 0


def test_giving_up_on_an_answer_aborts_its_request(server: RunningServer, http: httpx.Client) -> None:
    before = num_aborted(http)
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=0.2) as impatient:
        impatient.post(TEXT, json=ENDLESS)
    assert scrape_idle(http)["vllm:request_success_total[abort]"] == before + 1


def test_leaving_while_waiting_aborts_too(server: RunningServer, http: httpx.Client) -> None:
    before = num_aborted(http)
    with http.stream("POST", TEXT, json=ENDLESS | {"stream": True, "n": 16}) as response:
        lines = response.iter_lines()
        next(lines)
        wait_running(http, 16)
        with connected(server) as connection:
            connection.sendall(post({"prompt": "never scheduled"}))
            while not scrape(http)["vllm:num_requests_waiting"]:
                pass
        while scrape(http)["vllm:num_requests_waiting"]:
            pass
    assert scrape_idle(http)["vllm:request_success_total[abort]"] == before + 17


def test_others_go_on(http: httpx.Client, server: RunningServer) -> None:
    with http.stream("POST", TEXT, json=ENDLESS | {"stream": True}) as leaving:
        lines = leaving.iter_lines()
        next(lines)
        with httpx.Client(base_url=server.url) as other:
            answer = other.post(TEXT, json={"prompt": "<say>unharmed"}).json()
    assert answer["choices"][0]["text"] == "unharmed"


@pytest.mark.parametrize("sent", [b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nContent-Le", b"", None])
def test_leaving_before_the_request_is_whole_leaves_no_trace(
    server: RunningServer, http: httpx.Client, sent: bytes | None
) -> None:
    before = scrape_idle(http)["vllm:num_requests_total"]
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + b'{"prompt": "' if sent is None else sent)
    assert http.post(TEXT, json={"prompt": "<say>x"}).json()["choices"][0]["text"] == "x"
    assert scrape_idle(http)["vllm:num_requests_total"] == before + 1

"""HTTP as clients really speak it: offers to upgrade, old versions, half-closed sockets, waiting, compressed bodies."""

import gzip
import json
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.running import RunningServer, scripted
from tests.server.test_metrics import scrape

TEXT = "/v1/completions"
SAY = {"prompt": "<say>hello", "max_tokens": 20}


@contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=10)) as connection:
        yield connection


def post(body: dict[str, object], version: str = "1.1", *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {TEXT} HTTP/{version}", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


def read_all(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of what comes until the server closes, without interim answers."""
    received = b"".join(iter(lambda: connection.recv(65536), b""))
    while received.startswith(b"HTTP/1.1 100 "):
        received = received.partition(b"\r\n\r\n")[2]
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


def test_an_offer_to_upgrade_is_ignored_and_the_body_read(server: RunningServer) -> None:
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    with connected(server) as connection:
        request = post(SAY, "1.1", *offer)
        for piece in (request[:60], request[60:-7], request[-7:]):  # as packets may be cut
            connection.sendall(piece)
            time.sleep(0.02)
        connection.sendall(post(SAY, "1.1", *offer).replace(b"Connection: Upgrade", b"Connection: close, Upgrade"))
        head, body = read_all(connection)
    assert head.startswith(b"HTTP/1.1 200")
    assert body.count(b'"text":"hello"') == 2
    with connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    with connected(server) as connection:
        connection.sendall(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n")
        assert read_all(connection)[0].startswith(b"HTTP/1.1 40")


def test_to_http_1_0_a_stream_ends_with_the_connection(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(post(SAY | {"stream": True}, "1.0"))
        head, body = read_all(connection)
    assert b"chunked" not in head.lower()
    events = body.decode().removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    with connected(server) as connection:
        connection.sendall(post(SAY, "1.0"))
        head, body = read_all(connection)
    assert json.loads(body)["choices"][0]["text"] == "hello"
    assert b"content-length: %d" % len(body) in head.lower()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_has_closed_its_writing_side_gets_its_answers(server: RunningServer, version: str) -> None:
    for fields in ({}, {"stream": True}):
        with connected(server) as connection:
            connection.sendall(post({"prompt": "<slow><say>hello", "max_tokens": 20} | fields, version))
            connection.shutdown(socket.SHUT_WR)
            head, body = read_all(connection)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"finish_reason" in body
    with connected(server) as connection:
        connection.sendall(post(SAY) * 3)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection)[1].count(b'"text":"hello"') == 3


def test_a_client_that_closes_both_sides_is_gone_at_once(server: RunningServer, http: httpx.Client) -> None:
    with connected(server) as connection:
        connection.sendall(post({"prompt": "<slow>x", "max_tokens": 400}))
        while not scrape(http)["vllm:num_requests_running"]:
            pass
    end = time.monotonic() + 2  # the answer would take 8 s
    while scrape(http)["vllm:num_requests_running"]:
        assert time.monotonic() < end


def test_three_hundred_requests_at_once_on_one_connection(server: RunningServer) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(get * 299 + get.replace(b"Host", b"Connection: close\r\nHost"))
        _, body = read_all(connection)
    assert body.count(b'"ok"') == 300
    assert not any("Traceback" in line for line in server.lines)


def test_requests_behind_one_whose_client_leaves_are_not_run(server: RunningServer, http: httpx.Client) -> None:
    before = scrape(http)["vllm:num_requests_total"]
    with connected(server) as connection:
        connection.sendall(post({"prompt": "<slow>x", "max_tokens": 20}) * 50)
        while not scrape(http)["vllm:num_requests_running"]:
            pass
    idle_since = time.monotonic()
    while time.monotonic() < idle_since + 1:
        if scrape(http)["vllm:num_requests_running"]:
            idle_since = time.monotonic()
    assert scrape(http)["vllm:num_requests_total"] - before < 5
    assert not any("Traceback" in line for line in server.lines)


def test_probes_may_ask_for_the_head_only(http: httpx.Client) -> None:
    for path in ("/health", "/ping", "/livez"):
        response = http.head(path)
        assert response.status_code == 200
        assert response.content == b""


def test_compressed_bodies_are_read_within_the_limit(server: RunningServer, http: httpx.Client) -> None:
    data = json.dumps(SAY).encode()
    deflate = zlib.compressobj(wbits=-15)
    bodies = {
        "gzip": gzip.compress(data),
        "x-gzip": gzip.compress(data[:9]) + gzip.compress(data[9:]),  # in two members
        "deflate": zlib.compress(data),
        "Deflate": deflate.compress(data) + deflate.flush(),  # as some clients understand it
        "identity": data,
    }
    for encoding, body in bodies.items():
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        response = http.post(TEXT, content=body, headers=headers)
        assert response.json()["choices"][0]["text"] == "hello", encoding
    headers = {"Content-Type": "application/json"}
    refused = http.post(TEXT, content=data, headers=headers | {"Content-Encoding": "br"})
    assert refused.status_code == 415
    assert "'br'" in refused.json()["error"]["message"]
    broken = http.post(TEXT, content=bodies["gzip"][:-9], headers=headers | {"Content-Encoding": "gzip"})
    assert broken.status_code == 400
    assert "gzip" in broken.json()["error"]["message"]
    bomb = http.post(TEXT, content=gzip.compress(b" " * (64 << 20)), headers=headers | {"Content-Encoding": "gzip"})
    assert bomb.status_code == 413


def test_a_stream_that_waits_shows_that_it_lives(tokenizer_folder: Path) -> None:
    with (
        scripted(tokenizer_folder, "--sse-ping-interval", "0.2", "--timeout-keep-alive", "7").wait_ready() as server,
        httpx.Client(base_url=server.url, timeout=10) as http,
    ):
        body = {"prompt": "<hang>x", "max_tokens": 2, "stream": True}
        with http.stream("POST", TEXT, json=body) as response:
            assert response.status_code == 200
            assert response.headers["keep-alive"] == "timeout=7"
            lines = response.iter_lines()
            assert [next(lines) for _ in range(4)] == [": waiting", "", ": waiting", ""]
        refused = http.post(TEXT, json=SAY | {"stream": True, "max_tokens": 100_000})
        assert refused.status_code == 400


def test_addresses_of_both_families(tokenizer_folder: Path) -> None:
    for host, reached in {"::": ("127.0.0.1", "::1"), "localhost": ("127.0.0.1", "::1"), "[::1]": ("::1",)}.items():
        with scripted(tokenizer_folder, "--host", host) as server:
            port = int(server.url.rpartition(":")[2])
            for address in reached:
                socket.create_connection((address, port), timeout=2).close()

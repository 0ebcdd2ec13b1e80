"""Who is let in, and what a client may do to the others: keys, HTTPS, origins, limits, slowness."""

import hmac
import json
import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from fastapi.routing import iter_route_contexts
from starlette.types import Message, Receive, Scope, Send

from octavo.api.metrics import EngineMetrics
from octavo.server.app import create_app
from octavo.server.http.guard import ApiKeys
from octavo.server.service import Service
from tests.server.running import RunningServer, scripted
from tests.server.test_errors import error_of
from tests.server.test_metrics import scrape

TEXT = "/v1/completions"
KEYS = ["from-an-option", "from-another", "from-the-file", "from-the-environment"]
CLIENT_TIMEOUT_S = 0.8
LIMITS = ["--max-body-bytes", "20000", "--max-request-choices", "20"]


@pytest.fixture(scope="module")
def guarded(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Keys, limits, one foreign origin, and a log in JSON."""
    key_file = tmp_path_factory.mktemp("keys") / "keys"
    key_file.write_text(f"{KEYS[2]}\n")
    options = ["--api-key", *KEYS[:2], f"@{key_file}", "--allowed-origins", "https://friend.example"]
    options += [*LIMITS, "--client-timeout", str(CLIENT_TIMEOUT_S), "--access-log", "json"]
    with scripted(tokenizer_folder, *options, environment={"OCTAVO_API_KEY": KEYS[3]}) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def keyed(guarded: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=20) as client:
        yield client


@contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=10)) as connection:
        yield connection


def read_answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the body, of a connection that the server closes after it."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def dribble(connection: socket.socket, piece: bytes) -> float:
    """Seconds until the server had enough."""
    start = time.monotonic()
    connection.setblocking(False)
    while time.monotonic() - start < 10:
        try:
            connection.send(piece)
            if connection.recv(1, socket.MSG_PEEK):
                break
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            break
        time.sleep(0.02)
    connection.setblocking(True)
    return time.monotonic() - start


ROUTES = [
    (method, context.path)
    for context in iter_route_contexts(create_app(Service("m", EngineMetrics("m"))).routes)
    for method in sorted(context.methods or ())
]


def test_the_route_table_is_walked() -> None:
    assert {path for _, path in ROUTES} >= {"/health", "/ping", TEXT, "/metrics", "/openapi.json", "/livez"}


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/nothing"), ("GET", "/health/"), ("GET", "//health")])
def test_every_route_but_the_probes_needs_a_key(guarded: RunningServer, method: str, path: str) -> None:
    path = path.replace("{name:path}", "scripted").replace("{name}", "scripted")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEYS[0]}, {"Authorization": "Bearer"}):
        response = httpx.request(method, guarded.url + path, headers=headers, verify=False)
        if path in ("/health", "/ping"):
            assert response.status_code == 200
        else:
            assert response.status_code == 401
            assert method == "HEAD" or error_of(response)["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(guarded: RunningServer, key: str) -> None:
    response = httpx.get(guarded.url + "/v1/models", headers={"Authorization": f"bearer {key}"}, verify=False)
    assert response.status_code == 200


@pytest.mark.parametrize(("given", "status"), [(b"first", 200), (b"last", 200), (b"f", 401)])
async def test_every_key_is_compared_in_constant_time_whichever_fits(
    monkeypatch: pytest.MonkeyPatch, given: bytes, status: int
) -> None:
    compared, compare_digest = [], hmac.compare_digest

    def recording(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return compare_digest(given, key)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Message) -> None:
        statuses.append(message.get("status"))

    statuses: list[int | None] = []
    monkeypatch.setattr(hmac, "compare_digest", recording)
    scope = {"path": "/", "headers": [(b"authorization", b"Bearer " + given)]}
    await ApiKeys(app, ["first", "middle", "last"])(scope, None, send)  # type: ignore[arg-type]
    assert compared == [b"first", b"middle", b"last"]
    assert statuses[0] == status


def test_an_empty_key_file_is_one_line(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    with scripted(tokenizer_folder, "--api-key", f"@{tmp_path / 'keys'}") as server:
        assert server.wait_exit() == 1
        assert server.lines[1] == f"octavo: --api-key @{tmp_path / 'keys'} holds no key."


def test_https_serves_those_who_trust_it_and_asks_for_certificates(tokenizer_folder: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    own, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("someone@example.com")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    options = ["--ssl-keyfile", f"{tmp_path}/key.pem", "--ssl-certfile", f"{tmp_path}/cert.pem"]
    options += ["--ssl-ca-certs", f"{tmp_path}/ca.pem"]
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with scripted(tokenizer_folder, *options).wait_ready() as server:
        assert server.url.startswith("https://")
        with pytest.raises(httpx.TransportError), httpx.Client(verify=trusting) as nameless:
            nameless.get(server.url + "/health")
        client.configure_cert(trusting)
        with httpx.Client(verify=trusting) as http:
            answer = http.post(server.url + TEXT, json={"prompt": "<say>secret"})
        assert answer.json()["choices"][0]["text"] == "secret"
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")


def test_a_certificate_that_can_not_be_read_is_one_line(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    with scripted(tokenizer_folder, "--ssl-certfile", f"{tmp_path}/cert.pem") as server:
        assert server.wait_exit() == 1
        assert server.lines[1].startswith(f"octavo: --ssl-certfile {tmp_path}/cert.pem and what belongs to it: ")


def preflight(http: httpx.Client, origin: str) -> httpx.Response:
    return http.options(TEXT, headers={"Origin": origin, "Access-Control-Request-Method": "POST"})


def test_pages_of_other_origins_are_let_in_only_when_named(keyed: httpx.Client, http: httpx.Client) -> None:
    friend, stranger = preflight(keyed, "https://friend.example"), preflight(keyed, "https://stranger.example")
    assert friend.status_code == 200
    assert friend.headers["access-control-allow-origin"] == "https://friend.example"
    assert stranger.status_code == 403
    assert "origin" in error_of(stranger)["message"]
    closed = preflight(http, "https://friend.example")  # the default
    assert closed.status_code == 405
    assert not any(name.startswith("access-control") for name in closed.headers)
    for server, allowed in ((keyed, "https://friend.example"), (http, None)):
        answer = server.get("/v1/models", headers={"Origin": "https://friend.example"})
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_a_form_that_a_page_can_send_unasked_is_refused(http: httpx.Client) -> None:
    response = http.post(TEXT, content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]
    assert http.post(TEXT, content=b'{"prompt": "x"}').status_code == 415


def test_a_body_over_the_limit_is_refused_before_it_is_read(keyed: httpx.Client, guarded: RunningServer) -> None:
    response = keyed.post(TEXT, json={"prompt": "x" * 30_000})
    assert response.status_code == 413
    assert "20000" in error_of(response)["message"]
    head = f"POST {TEXT} HTTP/1.1\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Type: application/json\r\n"
    with connected(guarded) as connection:
        connection.sendall(head.encode() + b"Content-Length: 99999999\r\n\r\n")
        assert read_answer(connection)[0] == 413


def test_a_body_without_a_length_is_counted(keyed: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(50):
            yield b"x" * 1000

    response = keyed.post(TEXT, content=pieces(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


@pytest.mark.parametrize("fields", [{"prompt": ["x"] * 21}, {"prompt": ["x"] * 3, "n": 7}, {"prompt": "x", "n": 21}])
def test_more_choices_than_a_request_may_have_are_refused(keyed: httpx.Client, fields: dict[str, Any]) -> None:
    response = keyed.post(TEXT, json=fields)
    assert response.status_code == 400
    assert "20" in error_of(response)["message"]


def test_more_choices_of_a_chat_are_refused_too(keyed: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "n": 21, "max_tokens": 1}
    response = keyed.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == "n"


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /health HTTP/1.1\r\nX-Large: " + b"x" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X-Many: 1\r\n" * 7000 + b"\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-Endless: " + b"x" * 70_000,
        b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: " + b"x" * 70_000,
    ],
    ids=["long", "many", "path", "endless", "trailer"],
)
def test_headers_over_the_limit_are_refused(guarded: RunningServer, request_head: bytes) -> None:
    with connected(guarded) as connection:
        connection.sendall(request_head)
        if b"chunked" in request_head:  # the answer may have begun
            assert b"HTTP/1.1 4" in connection.recv(65536)
            return
        status, body = read_answer(connection)
    assert status == 431
    assert "65536" in body["error"]["message"]


@pytest.mark.parametrize("rubbish", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"{}"])
def test_what_is_no_http_is_refused_in_the_same_shape(guarded: RunningServer, rubbish: bytes) -> None:
    with connected(guarded) as connection:
        connection.sendall(rubbish + b"\r\n\r\n")
        status, body = read_answer(connection)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\n", b"a"),
        (b"GET /health HTTP/1.1\r\n", b"X-Slow: 1\r\n"),
        (
            f"POST {TEXT} HTTP/1.1\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Type: application/json\r\n"
            "Content-Length: 9000\r\n\r\n".encode(),
            b" ",
        ),
        (f"POST {TEXT} HTTP/1.1\r\nContent-Length: 9000\r\n\r\n".encode(), b" "),  # answered without a look at it
    ],
    ids=["silent", "one header", "headers", "body", "refused body"],
)
def test_a_client_that_dribbles_is_cut_off(guarded: RunningServer, head: bytes, piece: bytes) -> None:
    with connected(guarded) as connection:
        connection.sendall(head)
        if b"Bearer" in head or b"POST" not in head:
            seconds = dribble(connection, piece)
            assert CLIENT_TIMEOUT_S - 0.2 < seconds < CLIENT_TIMEOUT_S + 3
            status, body = read_answer(connection)
            assert status == 408
            assert "--client-timeout" in body["error"]["message"]
        else:
            assert b"401" in connection.recv(65536)
            start = time.monotonic()
            while connection.recv(65536):
                pass
            assert time.monotonic() - start < CLIENT_TIMEOUT_S + 3


def test_a_client_that_stops_reading_is_cut_off_and_its_request_too(tokenizer_folder: Path) -> None:
    options = ["--client-timeout", str(CLIENT_TIMEOUT_S), "--max-model-len", "100k", "--max-num-seqs", "256"]
    with scripted(tokenizer_folder, *options).wait_ready() as server, connected(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"prompt": "endless", "max_tokens": 90_000, "stream": True, "logprobs": 5, "n": 4})
        head = f"POST {TEXT} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body.encode())
        with httpx.Client(base_url=server.url) as http:
            deadline = time.monotonic() + 20
            while scrape(http)["vllm:request_success_total[abort]"] != 4:
                assert time.monotonic() < deadline
                time.sleep(0.1)


def test_a_hundred_dribbling_clients_do_not_hold_up_another(guarded: RunningServer, keyed: httpx.Client) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(100)]
    try:
        for connection in slow:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")
        start = time.monotonic()
        for _ in range(10):
            assert keyed.post(TEXT, json={"prompt": "<say>quick"}).json()["choices"][0]["text"] == "quick"
        assert time.monotonic() - start < 2
    finally:
        for connection in slow:
            connection.close()


def test_the_log_in_json_has_one_object_a_request(guarded: RunningServer, keyed: httpx.Client) -> None:
    headers = {"X-Request-Id": "trace-7.a"}
    answer = keyed.post(TEXT, json={"prompt": "<say>abc"}, headers=headers)
    assert answer.headers["x-request-id"] == "trace-7.a"
    assert answer.json()["id"] == "cmpl-trace-7.a"
    line = json.loads(guarded.wait_for('"request_id": "trace-7.a"').string)
    assert line.keys() == {
        "time", "client", "method", "path", "status", "duration_s", "request_id", "prompt_tokens", "completion_tokens",
    }  # fmt: skip
    assert (line["method"], line["path"], line["status"]) == ("POST", TEXT, 200)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (4, 4)
    assert 0 < line["duration_s"] < 5
    assert not any(key in line for line in guarded.lines for key in KEYS)  # a log is no place for keys


@pytest.mark.parametrize("request_id", ["", "two words", "x" * 129, "a\tb", 'quote"'])
def test_a_request_id_that_does_not_fit_is_replaced(http: httpx.Client, request_id: str) -> None:
    answer = http.get("/v1/models", headers={"X-Request-Id": request_id})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_every_answer_bears_an_id_also_an_error(http: httpx.Client) -> None:
    ids = {http.get(path).headers["x-request-id"] for path in ("/health", "/nothing", "/v1/models/no", "/metrics")}
    assert len(ids) == 4


def test_a_request_ends_at_its_time_out(tokenizer_folder: Path) -> None:
    endless = {"prompt": "<slow>endless", "max_tokens": 400}
    with (
        scripted(tokenizer_folder, "--request-timeout", "0.3").wait_ready() as server,
        httpx.Client(base_url=server.url) as http,
    ):
        response = http.post(TEXT, json=endless)
        assert response.status_code == 504
        assert error_of(response)["code"] == "request_timeout"
        *_, error, done = http.post(TEXT, json=endless | {"stream": True}).text.split("\n\n")[:-1]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert done == "data: [DONE]"
        assert http.post(TEXT, json={"prompt": "<say>x"}).status_code == 200

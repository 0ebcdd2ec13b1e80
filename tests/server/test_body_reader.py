"""Bodies that are read in a process of their own are answered as others are."""

import json
from typing import Any

import httpx
import psutil
import pytest

from octavo.server.body_reader import LARGE_BYTES, LIGHT_BYTES
from tests.server.running import RunningServer
from tests.server.sse import events_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "<say>ab"}]
HEADERS = {"Content-Type": "application/json"}


def heavy(body: dict[str, Any], num_bytes: int = LIGHT_BYTES + 1) -> bytes:
    return json.dumps(body | {"user": "x" * num_bytes}).encode()


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "<say>ab", "max_tokens": 5, "n": 2, "echo": True, "logprobs": 2}),
    (TEXT, {"prompt": [[2, 40, 41], [2, 50]], "max_tokens": 5, "stop": ["b"], "return_token_ids": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5, "bad_words": ["x"], "logit_bias": {"5": 1.0}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5, "tools": TOOLS, "logprobs": True, "top_logprobs": 1}),
    ("/tokenize", {"messages": MESSAGES, "return_token_strs": True}),
    ("/detokenize", {"tokens": [40, 41, 42]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_the_answer_is_the_same(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    for _ in range(2):  # the second time the prefix cache knows the prompt
        light = http.post(path, json=body)
        assert light.status_code == 200, light.text
    for num_bytes in (LIGHT_BYTES, LARGE_BYTES):
        answer = http.post(path, content=heavy(body, num_bytes), headers=HEADERS)
        assert answer.status_code == 200, answer.text
        assert essence(answer.json()) == essence(light.json())
        assert answer.headers.get("x-octavo-warning") == light.headers.get("x-octavo-warning")


def test_the_stream_is_the_same(http: httpx.Client) -> None:
    slow = [{"role": "user", "content": "<slow><say>ab"}]
    for path, body in ((TEXT, {"prompt": "<slow><say>abc"}), (CHAT, {"messages": slow, "tools": TOOLS})):
        streams = []
        for content in (json.dumps(body | {"stream": True}).encode(), heavy(body | {"stream": True})):
            with http.stream("POST", path, content=content, headers=HEADERS) as response:
                *events, done = events_of(response)
                streams.append([essence(json.loads(event)) for event in events])
                assert done == "[DONE]"
        assert streams[0] == streams[1]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (TEXT, {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        (TEXT, {"prompt": "x" * 600}, 400, None),
        (TEXT, {"prompt": "x", "model": "another"}, 404, "model"),
        (CHAT, {"messages": []}, 400, "messages"),
        (TEXT, {"prompt": "x", "structured_outputs": {"regex": "["}}, 400, "structured_outputs"),
        ("/v1/embeddings", {"input": "x"}, 400, None),
    ],
)
def test_the_refusal_is_the_same(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    light = http.post(path, json=body)
    answer = http.post(path, content=heavy(body), headers=HEADERS)
    assert (light.status_code, answer.status_code) == (status, status)
    assert answer.json() == light.json()
    assert answer.json()["error"]["param"] == param


def test_a_body_that_ends_its_process_is_refused_and_the_next_is_read(
    http: httpx.Client, server: RunningServer
) -> None:
    http.post(TEXT, content=heavy({"prompt": "<say>a"}), headers=HEADERS)
    readers = [p for p in psutil.Process(server.process.pid).children() if "body_reader" in " ".join(p.cmdline())]
    assert readers
    deep = b'{"prompt": "<say>a", "unknown": ' + b'{"a": [' * 20_000 + b"0" + b"]}" * 20_000 + b"}"
    answer = http.post(TEXT, content=deep, headers=HEADERS)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "The body nests too deeply.")
    for reader in readers:
        reader.kill()
    statuses = [http.post(TEXT, content=heavy({"prompt": "<say>a"}), headers=HEADERS).status_code for _ in range(2)]
    assert statuses[1] == 200

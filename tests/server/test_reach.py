"""Nothing in a request reaches a file, a shell or the network: the API process opens nothing on its behalf."""

import signal
from pathlib import Path
from typing import Any

import httpx

from tests.server.running import scripted

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BAIT = [
    "/etc/passwd",
    "file:///etc/passwd",
    "http://127.0.0.1:9/x",
    "$(touch /tmp/x)",
    "`id`",
    "; id",
    "../../etc/passwd",
]
TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('id') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
]


def requests(bait: str) -> list[tuple[str, dict[str, Any]]]:
    message = {"role": bait, "content": bait, "name": bait}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": bait}}]}
    tool = {"type": "function", "function": {"name": "f", "description": bait, "parameters": {"$ref": bait}}}
    return [
        (TEXT, {"prompt": f"<say>{bait}", "model": "scripted", "user": bait, "stop": [bait], "cache_salt": bait}),
        (TEXT, {"prompt": bait, "max_tokens": 5, "model": bait}),
        (TEXT, {"prompt": "x", "suffix": bait, "lora": bait, bait: bait}),
        (TEXT, {"prompt": "x", "max_tokens": 5, "structured_outputs": {"json": {"$ref": bait}}}),
        (CHAT, {"messages": [message], "max_tokens": 5, "chat_template_kwargs": {"x": bait, "y": {"z": bait}}}),
        (CHAT, {"messages": [message], "max_tokens": 5, "chat_template": bait}),
        (CHAT, {"messages": [image], "max_tokens": 5}),
        (CHAT, {"messages": [message], "max_tokens": 5, "tools": [tool]}),
        ("/tokenize", {"prompt": bait}),
        ("/v1/embeddings", {"input": bait}),
    ]


def test_a_request_reaches_no_file_no_shell_and_no_network(tokenizer_folder: Path) -> None:
    options = ["--access-log=off", "--trust-request-chat-template"]
    with scripted(tokenizer_folder, *options).wait_ready() as server, httpx.Client(base_url=server.url) as http:
        for path, body in [*requests("x"), *requests("{{ x.y.z }}")]:  # what is imported or started once for all
            http.post(path, json=body)
        http.get("/v1/models/x")
        server.process.send_signal(signal.SIGUSR1)
        for bait in [*BAIT, *TEMPLATES]:
            for path, body in requests(bait):
                assert http.post(path, json=body).status_code < 500
            assert http.get(f"/v1/models/{bait}").status_code < 500
        assert http.post(TEXT, json={"prompt": "<say>x"}).status_code == 200
        seen = [line for line in server.lines if line.startswith("audit")]
        assert seen == []
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert any(line.startswith("audit") for line in server.lines)  # the watch was on: ending removes a folder

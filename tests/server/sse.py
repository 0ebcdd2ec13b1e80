"""Reading server-sent events as they are on the wire."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

__all__ = ["chunks_of", "events_of", "text_of", "validate"]


def events_of(response: httpx.Response) -> Iterator[str]:
    """The data of each event; asserts that there is nothing else on the wire."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


def chunks_of(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """All chunks of a stream that ends well, each valid for the openai package's types."""
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        events = list(events_of(response))
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    for chunk in chunks:
        validate(chunk)
    return chunks


def validate(chunk: dict[str, Any]) -> None:
    if chunk["object"] == "chat.completion.chunk":
        ChatCompletionChunk.model_validate(chunk)
        return
    # A streamed text completion is a Completion whose choices need no finish_reason yet.
    choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    Completion.model_validate(chunk | {"choices": [_without_null(choice) for choice in choices]})


def _without_null(choice: dict[str, Any]) -> dict[str, Any]:
    """The first token of an echoed prompt has no log-probability: null, in OpenAI's own answers too, though its types
    have only numbers."""
    logprobs = choice["logprobs"] and dict(choice["logprobs"])
    if logprobs and logprobs["token_logprobs"][:1] == [None]:
        assert logprobs["top_logprobs"][0] is None
        logprobs["token_logprobs"] = [0.0, *logprobs["token_logprobs"][1:]]
        logprobs["top_logprobs"] = [{}, *logprobs["top_logprobs"][1:]]
    return choice | {"logprobs": logprobs}


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)

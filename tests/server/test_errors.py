"""What is wrong with a request is said before the first byte, in OpenAI's shape, and harms nobody else."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.sse import events_of

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "<say>x"}]
HUGE = 10**30
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


HOSTILE_FIELDS = [
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", 1e308),
    ("temperature", HUGE),
    ("temperature", True),
    ("temperature", []),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -7),
    ("top_k", 1.5),
    ("top_k", HUGE),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", 99),
    ("frequency_penalty", "1"),
    ("n", 0),
    ("n", -3),
    ("n", HUGE),
    ("n", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", HUGE),
    ("max_tokens", "5"),
    ("min_tokens", -1),
    ("min_tokens", HUGE),
    ("seed", HUGE),
    ("seed", -HUGE),
    ("seed", "7"),
    ("stop", ""),
    ("stop", 5),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 100),
    ("stop", [["a"]]),
    ("stop_token_ids", [300]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [HUGE]),
    ("stop_token_ids", "a"),
    ("logit_bias", {"300": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", [1]),
    ("stream", "yes"),
    ("stream_options", 5),
    ("stream_options", {"include_usage": True}),
    ("priority", HUGE),
    ("cache_salt", 5),
    ("cache_salt", ""),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [300]),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [HUGE]),
    ("bad_words", "a"),
    ("bad_words", [" "]),
    ("bad_words", ["a"] * 300),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", True),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", "5"),
    ("return_token_ids", 1),
    ("best_of", 2),
    ("model", 5),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("field", "value"), HOSTILE_FIELDS)
@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "<say>x"})])
def test_a_hostile_field_is_refused_by_name(
    http: httpx.Client, path: str, prompt: dict[str, Any], field: str, value: Any
) -> None:
    response = http.post(path, json={**prompt, field: value})
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    if error["code"] != "context_length_exceeded":
        assert error["param"] == field
        assert len(error["message"]) < 400


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_refused(http: httpx.Client, literal: str) -> None:
    body = f'{{"prompt": "x", "temperature": {literal}}}'
    response = http.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["param"] == "temperature"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"content": "no role"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"documents": ["x"]}, "documents"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"echo": True, "logprobs": 21}, "logprobs"),
        (TEXT, {"echo": True, "max_tokens": -1}, "max_tokens"),
        (TEXT, {"logits_processors": ["x"]}, "logits_processors"),
        (TEXT, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (TEXT, {"suffix": "x"}, "suffix"),
        (TEXT, {"length_penalty": 0.5}, "length_penalty"),
        (CHAT, {"early_stopping": True}, "early_stopping"),
        (TEXT, {"use_beam_search": True, "n": 2, "best_of": 4}, "best_of"),
        (TEXT, {"use_beam_search": True, "length_penalty": 100.0}, "length_penalty"),
        (TEXT, {"use_beam_search": True, "temperature": 0.7}, "temperature"),
        (CHAT, {"use_beam_search": True, "top_p": 0.5}, "top_p"),
        (CHAT, {"use_beam_search": True, "stop": "x"}, "stop"),
        (TEXT, {"use_beam_search": True, "logit_bias": {"3": 1.0}}, "logit_bias"),
        (TEXT, {"use_beam_search": True, "echo": True, "logprobs": 1}, "echo"),
        (CHAT, {"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [5, "a"]}, "prompt"),
        (TEXT, {"prompt": [300]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [HUGE]}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [HUGE]}, "tokens"),
    ],
)
def test_a_field_that_can_not_be_served_is_named(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    required: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "x"}}
    response = http.post(path, json=required.get(path, {}) | fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(http: httpx.Client, body: bytes) -> None:
    response = http.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_a_surrogate_in_a_template_variable_is_refused(http: httpx.Client) -> None:
    messages = b'[{"role": "\\ud800", "content": "x"}]'
    body = b'{"messages": ' + messages + b"}"
    response = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(http: httpx.Client, stream: bool) -> None:
    response = http.post(TEXT, json={"prompt": "x" * 600, "max_tokens": 5, "stream": stream})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("512", "600", "605"))


def test_a_long_prompt_is_tokenised_all_the_same(http: httpx.Client) -> None:
    response = http.post("/tokenize", json={"prompt": "the " * 10_000})
    assert response.json()["count"] == 20_000


def test_what_the_chat_template_says_is_passed_on(http: httpx.Client) -> None:
    response = http.post(CHAT, json={"messages": [{"role": "nobody", "content": "x"}]})
    assert response.status_code == 400
    assert "Nobody may not speak." in error_of(response)["message"]
    assert error_of(response)["param"] == "messages"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"


def test_an_unknown_path_and_method_answer_in_the_same_shape(http: httpx.Client) -> None:
    assert error_of(response := http.get("/v2/nothing"))["type"] == "invalid_request_error"
    assert response.status_code == 404
    assert error_of(response := http.get(CHAT))["type"] == "invalid_request_error"
    assert response.status_code == 405


@pytest.mark.parametrize("token", ["<fail>", "<nan>"])
def test_a_failed_step_is_a_500_for_its_request(http: httpx.Client, token: str) -> None:
    response = http.post(TEXT, json={"prompt": f"{token}<say>abcdef"})
    assert response.status_code == 500
    assert error_of(response)["code"] == "request_failed"
    assert http.post(TEXT, json={"prompt": "<say>x"}).json()["choices"][0]["text"] == "x"


@pytest.mark.parametrize("token", ["<fail>", "<nan>"])
def test_a_failure_after_the_first_byte_is_an_event(http: httpx.Client, token: str) -> None:
    with http.stream("POST", TEXT, json={"prompt": f"<slow>{token}<say>abcdef", "stream": True}) as response:
        assert response.status_code == 200
        *chunks, error, done = events_of(response)
    assert [json.loads(chunk)["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
    assert json.loads(error)["error"]["code"] == "request_failed"
    assert done == "[DONE]"


def test_the_client_raises_an_error_that_came_in_a_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="scripted", prompt="<slow><nan><say>abcdef", stream=True)
    with pytest.raises(openai.APIError, match="NaN"):
        list(stream)

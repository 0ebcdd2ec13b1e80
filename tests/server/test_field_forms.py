"""Fields in the forms that clients send them in, which are wider than the reference's."""

import json
from typing import Any

import httpx
import pytest

from tests.server.sse import chunks_of, text_of
from tests.server.test_errors import error_of
from tests.server.test_fields import post, token_ids

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "<say>abc"}]


def test_whole_floats_are_integers(http: httpx.Client) -> None:
    fields = {
        "max_tokens": 2.0, "seed": 5.0, "n": 1.0, "best_of": 1.0, "min_tokens": 0.0, "top_k": 5.0, "logprobs": 1.0,
        "prompt_logprobs": 1.0, "priority": 1.0, "truncate_prompt_tokens": 9.0, "stop_token_ids": [44.0],
        "allowed_token_ids": [20.0, 21],
    }  # fmt: skip
    assert post(http, TEXT, prompt="<say>abc", **fields)["usage"]["completion_tokens"] == 2
    assert post(http, TEXT, prompt=[44.0, 45], max_tokens=1)["usage"]["prompt_tokens"] == 2
    assert post(http, TEXT, prompt=[[44.0], [45]], max_tokens=1)["usage"]["prompt_tokens"] == 2
    chat = {"max_completion_tokens": 2.0, "logprobs": True, "top_logprobs": 1.0}
    assert post(http, CHAT, messages=USER, **chat)["usage"]["completion_tokens"] == 2
    assert http.post("/detokenize", json={"tokens": [44.0]}).status_code == 200
    for path, prompt in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": USER})):
        for value in (2.5, "2", True, [2]):
            assert error_of(http.post(path, json={**prompt, "max_tokens": value}))["param"] == "max_tokens"


LONE = [
    (TEXT, {"prompt": "x", "stop": "\ud800"}, "stop"),
    (TEXT, {"prompt": "x", "stop": ["a", "\udfff b"]}, "stop"),
    (TEXT, {"prompt": "x\ud800"}, "prompt"),
    (TEXT, {"prompt": "x", "cache_salt": "\ud800"}, "cache_salt"),
    (TEXT, {"prompt": "x", "bad_words": ["\ud800"]}, "bad_words"),
    (TEXT, {"prompt": "x", "model": "\ud800"}, "model"),
    (TEXT, {"prompt": "x", "logit_bias": {"\ud800": 1}}, "logit_bias"),
    (TEXT, {"prompt": "x", "a\ud800": 1}, "a\\ud800"),
    (TEXT, {"prompt": "x", "structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs"),
    (TEXT, {"prompt": "x", "structured_outputs": {"json": {"properties": {"\ud800": {}}}}}, "structured_outputs"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "user\udc00", "content": "x"}]}, "messages"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"a": {"b": ["\ud800"]}}}, "chat_template_kwargs"),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools"),
    ("/v1/embeddings", {"input": ["\ud800"]}, "input"),
    ("/tokenize", {"prompt": "\ud800"}, "prompt"),
]


def test_a_lone_surrogate_is_refused_by_its_field_s_name(http: httpx.Client) -> None:
    for path, body, param in LONE:
        response = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert (response.status_code, error_of(response)["param"]) == (400, param), body
        assert "surrogate" in error_of(response)["message"]
    pair = json.dumps({"prompt": "<say>\U0001f600"})  # escaped, as two surrogates
    response = http.post(TEXT, content=pair, headers={"Content-Type": "application/json"})
    assert response.json()["choices"][0]["text"] == "\U0001f600"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_line_separators_do_not_cut_an_event(http: httpx.Client, path: str) -> None:
    said = "a\u2028b\u2029c\x85d é"
    body = {"messages": [{"role": "user", "content": f"<say>{said}"}]} if path == CHAT else {"prompt": f"<say>{said}"}
    assert text_of(chunks_of(http, path, **body)) == said


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_in_the_shapes_of_stream_options(http: httpx.Client, path: str) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "<say>abc"}
    for options, has_last, has_each in (
        ({}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": True, "continuous_usage_stats": False}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ):
        chunks = chunks_of(http, path, **body, stream_options=options)
        assert (chunks[-1]["choices"] == []) == has_last
        with_choices = [chunk for chunk in chunks if chunk["choices"]]
        assert all((chunk.get("usage") is not None) == has_each for chunk in with_choices)
        if has_each:
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts[:-1] == sorted(set(counts))  # each chunk counts more than the one before, the last the same
            assert counts[-1] == counts[-2] == 4
    for options in ({"include_usage": None}, {"include_usage": True}, {"continuous_usage_stats": True}):
        assert error_of(http.post(path, json=body | {"stream_options": options}))["param"] == "stream_options"


def test_a_prompt_is_cut_on_the_side_that_is_asked_for(http: httpx.Client) -> None:
    prompt = token_ids(http, "abcdefgh")
    for side, kept in (("right", prompt[:3]), ("left", prompt[-3:]), (None, prompt[-3:])):
        body = {"prompt": prompt, "truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
        assert post(http, TEXT, **body, max_tokens=1)["choices"][0]["prompt_token_ids"] == kept
    for path, body in ((TEXT, {"prompt": prompt}), (CHAT, {"messages": USER})):
        error = error_of(http.post(path, json=body | {"truncate_prompt_tokens": 513}))
        assert error["param"] == "truncate_prompt_tokens"
        assert "512" in error["message"]


def test_limits_that_no_request_asks_for_shrink_to_the_room_and_others_do_not(http: httpx.Client) -> None:
    prompt = [50] * 505
    assert post(http, TEXT, prompt=prompt)["usage"]["completion_tokens"] == 7  # 16 is OpenAI's default
    error = error_of(http.post(TEXT, json={"prompt": prompt, "max_tokens": 16}))
    assert error["code"] == "context_length_exceeded"
    for path, body in ((TEXT, {"prompt": prompt, "max_tokens": None}), (CHAT, {"messages": USER})):
        assert error_of(http.post(path, json=body | {"min_tokens": 512}))["param"] == "min_tokens"


def test_tokens_are_spelled_as_the_vocabulary_does(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "the wor é", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["the", "Ġwor", "Ġ", "Ã", "©"]


def test_what_was_not_asked_for_is_null_in_whole_answers_and_absent_from_chunks(http: httpx.Client) -> None:
    (choice,) = post(http, TEXT, prompt="<say>a")["choices"]
    assert [choice[name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")] == [None] * 3
    chat = post(http, CHAT, messages=USER)
    assert [chat["prompt_token_ids"], chat["prompt_logprobs"], chat["choices"][0]["token_ids"]] == [None] * 3
    assert not any("token_ids" in json.dumps(chunk) for chunk in chunks_of(http, CHAT, messages=USER))


def test_an_echoed_stream_has_the_prompt_s_token_ids_in_its_first_chunk(http: httpx.Client) -> None:
    prompt = token_ids(http, "x<say>ab")
    for fields in ({}, {"logprobs": 0}):
        chunks = chunks_of(http, TEXT, prompt=prompt, echo=True, return_token_ids=True, **fields)
        first, *rest = [chunk["choices"][0] for chunk in chunks]
        assert first["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in choice for choice in rest)
        said: list[Any] = [token_id for choice in (first, *rest) for token_id in choice["token_ids"]]
        assert len(said) == 3


def test_invocations_go_where_their_fields_belong(http: httpx.Client) -> None:
    chat = http.post("/invocations", json={"messages": USER, "max_tokens": 2.0}).json()
    assert (chat["object"], chat["choices"][0]["message"]["content"]) == ("chat.completion", "ab")
    text = http.post("/invocations", json={"prompt": "<say>x", "model": "scripted"}).json()
    assert (text["object"], text["choices"][0]["text"]) == ("text_completion", "x")
    for body, param in (
        ({}, None), ({"messages": "x"}, "messages"), ({"prompt": "x", "n": 0}, "n"), ({"input": "x"}, None),
    ):  # fmt: skip
        response = http.post("/invocations", json=body)
        assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_chosen_tokens(http: httpx.Client, stream: bool) -> None:
    for path, body, param in (
        (TEXT, {"prompt": "x", "logprob_token_ids": [5]}, "logprob_token_ids"),
        (CHAT, {"messages": USER, "logprob_token_ids": [5]}, "logprob_token_ids"),
        (TEXT, {"prompt": "x", "logprobs": 1, "logprob_token_ids": [300]}, "logprob_token_ids"),
        (TEXT, {"prompt": "x", "logprobs": 1, "logprob_token_ids": [-1]}, "logprob_token_ids"),
        (TEXT, {"prompt": "x", "logprobs": 1, "logprob_token_ids": [5] * 129}, "logprob_token_ids"),
    ):
        assert error_of(http.post(path, json=body | {"stream": stream}))["param"] == param


def test_a_fault_that_only_the_engine_finds_names_its_field(http: httpx.Client) -> None:
    for fields in ({"guided_regex": "a"}, {"regex": "a"}, {"structured_outputs": {"regex": "a"}}):
        for stream in (False, True):  # this engine has no grammars
            response = http.post(TEXT, json={"prompt": "x", "stream": stream, **fields})
            assert (response.status_code, error_of(response)["param"]) == (400, *fields), response.text
    assert post(http, TEXT, prompt="<say>next")["choices"][0]["text"] == "next"

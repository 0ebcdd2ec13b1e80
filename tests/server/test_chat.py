"""Chat completions, by the official client and on the wire."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import RunningServer
from tests.server.sse import chunks_of, text_of

PATH = "/v1/chat/completions"


def say(text: str, *tokens: str) -> Any:
    return [{"role": "user", "content": "".join(tokens) + "<say>" + text}]


def test_the_client_gets_an_answer_with_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=say("Hello!"))
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Hello!") + 1  # the end-of-sequence token counts
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_deltas_join_to_the_answer(client: openai.OpenAI) -> None:
    messages = say("the words 👩‍👩‍👧 čeština 漢字")
    whole = client.chat.completions.create(model="scripted", messages=messages)
    stream = client.chat.completions.create(model="scripted", messages=messages, stream=True)
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(deltas) == whole.choices[0].message.content == "the words 👩‍👩‍👧 čeština 漢字"
    assert not any("\ufffd" in delta for delta in deltas)


async def test_concurrent_async_streams_keep_their_texts_apart(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def stream(text: str) -> str:
            chunks = await client.chat.completions.create(model="scripted", messages=say(text), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        texts = [f"number {i} " * 5 for i in range(40)]
        assert await asyncio.gather(*map(stream, texts)) == texts


def test_a_stream_opens_with_the_role_and_ends_each_choice_once(http: httpx.Client) -> None:
    chunks = chunks_of(http, PATH, messages=say("the end"))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_comes_in_a_last_chunk_without_choices(http: httpx.Client) -> None:
    chunks = chunks_of(http, PATH, messages=say("abc"), stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_usage_comes_with_every_chunk_on_demand(http: httpx.Client) -> None:
    chunks = chunks_of(http, PATH, messages=say("abc"), stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_choices_of_one_prompt_stream_side_by_side(http: httpx.Client) -> None:
    chunks = chunks_of(http, PATH, messages=say("ab"), n=3, stream_options={"include_usage": True})
    assert [text_of(chunks, index) for index in range(3)] == ["ab", "abab", "ababab"]
    finished = [choice["index"] for c in chunks for choice in c["choices"] if choice["finish_reason"]]
    assert finished == [0, 1, 2]
    single = http.post(PATH, json={"messages": say("ab")}).json()["usage"]
    assert chunks[-1]["usage"]["prompt_tokens"] == single["prompt_tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == 3 + 5 + 7


def test_max_completion_tokens_cuts_the_answer(client: openai.OpenAI) -> None:
    messages = say("abcdefgh")
    answer = client.chat.completions.create(
        model="scripted", messages=messages, max_completion_tokens=3, extra_body={"max_tokens": 5}
    )
    assert answer.choices[0].message.content == "abc"
    assert answer.choices[0].finish_reason == "length"


def test_without_a_limit_the_answer_may_fill_the_context(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "again"}]
    answer = client.chat.completions.create(model="scripted", messages=messages, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["the w", ["zzz", "the w"]])
@pytest.mark.parametrize(("include", "text"), [(False, "or "), (True, "or the w")])
def test_a_stop_string_ends_the_answer(
    http: httpx.Client, stream: bool, stop: str | list[str], include: bool, text: str
) -> None:
    fields: dict[str, Any] = {"messages": say("or the world"), "stop": stop, "include_stop_str_in_output": include}
    if stream:
        chunks = chunks_of(http, PATH, **fields, stream_options={"include_usage": True})
        usage, last = chunks[-1]["usage"], chunks[-2]["choices"][0]
        assert text_of(chunks) == text
    else:
        answer = http.post(PATH, json=fields).json()
        usage, last = answer["usage"], answer["choices"][0]
        assert last["message"]["content"] == text
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"] == "the w"
    # "or", " ", "the" and " wor", in whose middle the stop is complete.
    assert usage["completion_tokens"] == 4


def test_a_stop_token_is_named_and_left_out(http: httpx.Client) -> None:
    (stop_id,) = http.post("/tokenize", json={"prompt": "c"}).json()["tokens"]
    answer = http.post(PATH, json={"messages": say("abcd"), "stop_token_ids": [stop_id]}).json()
    assert answer["choices"][0]["message"]["content"] == "ab"
    assert answer["choices"][0]["stop_reason"] == stop_id


def test_logprobs_have_the_true_bytes(client: openai.OpenAI) -> None:
    messages = say("é漢!")
    answer = client.chat.completions.create(model="scripted", messages=messages, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == "é漢!"
    assert [entry.token for entry in content[:2]] == ["\\xc3", "\\xa9"]
    assert all(len(entry.top_logprobs) == 2 for entry in content)


def test_logprobs_without_top_have_empty_lists(http: httpx.Client) -> None:
    chunks = chunks_of(http, PATH, messages=say("é!"), logprobs=True)
    entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "é!"
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_text_parts_are_joined(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "<say>one"}, {"type": "text", "text": "two"}]
    answer = http.post(PATH, json={"messages": [{"role": "user", "content": parts}]}).json()
    assert answer["choices"][0]["message"]["content"] == "one\ntwo"


def test_the_last_message_can_be_continued(http: httpx.Client) -> None:
    messages = [*say("x"), {"role": "assistant", "content": "<say>go on"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    answer = http.post(PATH, json=fields).json()
    assert answer["choices"][0]["message"]["content"] == "go on"


def test_a_repeated_prompt_is_reported_as_cached(http: httpx.Client) -> None:
    messages = say("cached", "a prompt of more than a block, which is unlike all others ")
    first, second = (http.post(PATH, json={"messages": messages}).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert cached % 16 == 0


def test_an_unknown_field_is_named_in_a_header(http: httpx.Client) -> None:
    response = http.post(PATH, json={"messages": say("x"), "frobnicate\r\nx": 1, "user": "me", "store": False})
    assert response.status_code == 200
    assert response.headers["x-octavo-warning"] == 'unknown fields ignored: "frobnicate\\r\\nx"'


def test_fields_that_ask_for_nothing_are_accepted(http: httpx.Client) -> None:
    nothing: dict[str, Any] = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "seed": None,
        "stop": None,
    }
    response = http.post(PATH, json={"messages": say("x"), **nothing})
    assert response.status_code == 200
    assert "x-octavo-warning" not in response.headers

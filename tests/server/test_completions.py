"""Plain completions: prompts in four forms, echo, OpenAI's older logprobs."""

from typing import Any

import httpx
import openai
import pytest

from tests.server.scripted_engine import SAY
from tests.server.sse import chunks_of, text_of

PATH = "/v1/completions"


def test_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="<say>" + "x" * 30)
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


def token_ids(http: httpx.Client, text: str) -> list[int]:
    ids: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def test_every_form_of_prompt(http: httpx.Client) -> None:
    first, second = token_ids(http, "<say>a"), token_ids(http, "<say>b")
    for prompt, texts in [
        ("<say>a", ["a"]),
        (["<say>a", "<say>b"], ["a", "b"]),
        (first, ["a"]),
        ([first, second], ["a", "b"]),
    ]:
        answer = http.post(PATH, json={"prompt": prompt}).json()
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


def test_prompts_and_choices_stream_under_their_own_index(http: httpx.Client) -> None:
    chunks = chunks_of(http, PATH, prompt=["<say>a", "<say>b"], n=2)
    assert [text_of(chunks, index) for index in range(4)] == ["a", "aa", "b", "bb"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(http: httpx.Client, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": "<say>abc", "echo": True}
    if stream:
        text = text_of(chunks_of(http, PATH, **fields))
    else:
        text = http.post(PATH, json=fields).json()["choices"][0]["text"]
    assert text == "<say>abcabc"


def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_stream(http: httpx.Client) -> None:
    character = token_ids(http, "漢")
    assert len(character) == 3
    prompt = [*token_ids(http, "once "), SAY, *character[1:], *character]
    chunks = chunks_of(http, PATH, prompt=prompt)
    assert (
        text_of(chunks) == "\ufffd" * 2 + "漢" == http.post(PATH, json={"prompt": prompt}).json()["choices"][0]["text"]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_name_tokens_and_offsets(http: httpx.Client, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": "<say>the é", "logprobs": 2}
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(http, PATH, **fields)]
        logprobs = {key: [item for part in parts for item in part[key]] for key in parts[0]}
    else:
        logprobs = http.post(PATH, json=fields).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["the", " ", "bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert logprobs["text_offset"][:3] == [0, 3, 4]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["top_logprobs"][0]["the"] == -0.5
    assert len(logprobs["top_logprobs"][0]) == 2


def test_zero_logprobs_name_the_chosen_token_alone(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="<say>a", logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs == [{"a": -0.5}, {"</s>": -0.5}]


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    text = "the 漢字 wor\n\t👩‍👧"
    tokens = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}


def test_tokenize_renders_messages(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "<s>user\nhi</s>"


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "scripted"
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")

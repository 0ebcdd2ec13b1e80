"""Fields that vLLM has beyond OpenAI's: what they ask for is in the answer, streamed or whole."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.server.running import RunningServer, scripted
from tests.server.scripted_engine import END, SAY, START
from tests.server.sse import chunks_of, text_of, validate

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "<say>abc"}]


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    if path == CHAT:
        ChatCompletion.model_validate(answer)
    else:
        validate(answer)
    return answer


def error_of(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    return error


def token_ids(http: httpx.Client, text: str) -> list[int]:
    ids: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def logprobs_of(http: httpx.Client, stream: bool, **body: Any) -> tuple[str, dict[str, list[Any]]]:
    """The text, and the log-probabilities of all chunks joined."""
    if not stream:
        (choice,) = post(http, TEXT, **body)["choices"]
        return choice["text"], choice["logprobs"]
    chunks = chunks_of(http, TEXT, **body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    return text_of(chunks), {key: [item for part in parts for item in part[key]] for key in parts[0]}


@pytest.mark.parametrize("stream", [False, True])
class TestEchoWithLogprobs:
    def test_the_prompt_s_tokens_go_first_and_the_very_first_has_none(self, http: httpx.Client, stream: bool) -> None:
        text, logprobs = logprobs_of(http, stream, prompt="the é<say>abc", echo=True, logprobs=1)
        assert text == "the é<say>abcabc"
        tokens = ["the", " ", "bytes:\\xc3", "bytes:\\xa9", "<say>", "a", "b", "c", "a", "b", "c", "</s>"]
        assert logprobs["tokens"] == tokens
        assert logprobs["text_offset"] == [0, 3, 4, 4, 5, 10, 11, 12, 13, 14, 15, 16]
        assert logprobs["token_logprobs"] == [None, *(-1.0 - i for i in range(7)), *[-0.5] * 4]
        assert logprobs["top_logprobs"][:3] == [None, {"</s>": -0.125, " ": -1.0}, {"</s>": -0.125, tokens[2]: -2.0}]

    def test_max_tokens_of_0_scores_the_prompt_alone(self, http: httpx.Client, stream: bool) -> None:
        text, logprobs = logprobs_of(http, stream, prompt="the wor", echo=True, logprobs=0, max_tokens=0)
        assert text == "the wor"
        assert logprobs["tokens"] == ["the", " wor"]
        assert logprobs["token_logprobs"] == [None, -1.0]
        assert logprobs["top_logprobs"] == [None, {" wor": -1.0}]

    def test_a_prompt_of_several_steps_has_all_of_them(self, http: httpx.Client, stream: bool) -> None:
        prompt = [START] + [20 + i % 90 for i in range(510)] + [SAY]
        _, logprobs = logprobs_of(http, stream, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        assert logprobs["token_logprobs"] == [None, *(-1.0 - i for i in range(511))]

    def test_max_tokens_of_1_is_what_lm_eval_reads(self, http: httpx.Client, stream: bool) -> None:
        _, logprobs = logprobs_of(
            http, stream, prompt=token_ids(http, "the wor<say>x"), echo=True, logprobs=1, max_tokens=1
        )
        assert logprobs["token_logprobs"][1:-1] == [-1.0, -2.0, -3.0]
        assert logprobs["token_logprobs"][-1] == -0.5


def test_echo_with_logprobs_of_several_prompts_and_choices(http: httpx.Client) -> None:
    body = {"prompt": ["<say>a", "x<say>b"], "n": 2, "echo": True, "logprobs": 0}
    whole = post(http, TEXT, **body)["choices"]
    assert [choice["text"] for choice in whole] == ["<say>aa", "<say>aaa", "x<say>bb", "x<say>bbb"]
    assert [len(choice["logprobs"]["tokens"]) for choice in whole] == [4, 5, 5, 6]
    chunks = chunks_of(http, TEXT, **body)
    assert [text_of(chunks, index) for index in range(4)] == [choice["text"] for choice in whole]


def test_nothing_is_counted_when_nothing_is_generated(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="abc", echo=True, max_tokens=0)
    assert answer.usage is not None
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


def test_prompt_logprobs_are_keyed_by_token_id(http: httpx.Client) -> None:
    the, word = token_ids(http, "the wor")
    (choice,) = post(http, TEXT, prompt=[the, word, SAY], prompt_logprobs=1)["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(word): {"logprob": -1.0, "rank": 2, "decoded_token": " wor"},
            str(END): {"logprob": -0.125, "rank": 1, "decoded_token": "</s>"},
        },
        {
            str(SAY): {"logprob": -2.0, "rank": 3, "decoded_token": "<say>"},
            str(END): {"logprob": -0.125, "rank": 1, "decoded_token": "</s>"},
        },
    ]
    chat = post(http, CHAT, messages=USER, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert [len(entry) for entry in chat["prompt_logprobs"][1:]] == [1] * (len(chat["prompt_logprobs"]) - 1)
    assert post(http, CHAT, messages=USER)["prompt_logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompt_logprobs_do_not_stream(http: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "a"}
    assert error_of(http, path, **body, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


def test_token_ids_are_returned_beside_the_text(http: httpx.Client) -> None:
    prompt, said = token_ids(http, "x<say>é"), [*token_ids(http, "é"), END]
    (choice,) = post(http, TEXT, prompt=prompt, return_token_ids=True)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, said)
    chunks = [chunk["choices"][0] for chunk in chunks_of(http, TEXT, prompt=prompt, return_token_ids=True)]
    assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == said
    assert chunks[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


def test_token_ids_of_a_chat(http: httpx.Client) -> None:
    answer = post(http, CHAT, messages=USER, return_token_ids=True)
    rendered = http.post("/tokenize", json={"messages": USER}).json()["tokens"]
    said = [*token_ids(http, "abc"), END]
    assert answer["prompt_token_ids"] == rendered
    assert answer["choices"][0]["token_ids"] == said
    first, *rest = chunks_of(http, CHAT, messages=USER, return_token_ids=True)
    assert first["prompt_token_ids"] == rendered
    assert [token_id for chunk in rest for token_id in chunk["choices"][0]["token_ids"]] == said
    plain = post(http, CHAT, messages=USER)
    assert plain["prompt_token_ids"] is None
    assert plain["choices"][0]["token_ids"] is None


def test_tokens_in_logprobs_can_be_named_by_id(http: httpx.Client) -> None:
    (choice,) = post(http, TEXT, prompt="<say>a", logprobs=0, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in [*token_ids(http, "a"), END]]


def test_a_prompt_is_cut_to_its_last_tokens(http: httpx.Client) -> None:
    (choice,) = post(http, TEXT, prompt="x" * 30 + "<say>ab", truncate_prompt_tokens=3, echo=True)["choices"]
    assert choice["text"] == "<say>abab"
    answer = post(http, TEXT, prompt="x" * 900 + "<say>ab", truncate_prompt_tokens=-1, max_tokens=12)
    assert answer["usage"]["prompt_tokens"] == 500
    answer = post(
        http, CHAT, messages=[{"role": "user", "content": "x" * 900}], truncate_prompt_tokens=-1, max_tokens=2
    )
    assert answer["usage"]["prompt_tokens"] == 510


def test_a_chat_answer_can_begin_with_the_message_it_continues(http: httpx.Client) -> None:
    messages = [*USER, {"role": "assistant", "content": "<say>so"}]
    body = {"messages": messages, "echo": True, "continue_final_message": True, "add_generation_prompt": False}
    assert post(http, CHAT, **body)["choices"][0]["message"]["content"] == "<say>soso"
    assert text_of(chunks_of(http, CHAT, **body)) == "<say>soso"
    assert post(http, CHAT, messages=USER, echo=True)["choices"][0]["message"]["content"] == "abc"


def test_min_tokens_holds_stop_strings_back(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="scripted", prompt="<say>axbxc", stop="x", extra_body={"min_tokens": 2}, max_tokens=50
    )
    assert answer.choices[0].text == "axb"


def test_fields_that_change_nothing_are_taken_without_a_warning(http: httpx.Client) -> None:
    fields: dict[str, Any] = {
        "user": "me",
        "cache_salt": "salt",
        "spaces_between_special_tokens": False,
        "skip_special_tokens": True,
        "bad_words": ["zz"],
        "allowed_token_ids": [20, 21],
        "best_of": 1,
        "suffix": None,
        "priority": 3,
    }
    response = http.post(TEXT, json={"prompt": "<say>a", **fields})
    assert response.status_code == 200
    assert "x-octavo-warning" not in response.headers


@pytest.fixture(scope="module")
def strict(tokenizer_folder: Path) -> Any:
    options = ["--strict", "--trust-request-chat-template", "--served-model-name", "first", "second", "third/name"]
    options += ["--override-generation-config", '{"max_new_tokens": 3}']
    with scripted(tokenizer_folder, *options) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        server.wait_ready()
        yield http, server


def test_unknown_fields_are_refused_by_name_when_strict(strict: tuple[httpx.Client, RunningServer]) -> None:
    error = error_of(strict[0], TEXT, prompt="<say>a", temprature=0, metadata={})
    assert error["param"] == "temprature"
    assert '"temprature"' in error["message"]


def test_a_request_s_own_template_is_used_where_it_is_trusted(strict: tuple[httpx.Client, RunningServer]) -> None:
    http, _ = strict
    template = "{% for d in documents %}{{ d['text'] }}{% endfor %}<say>{{ word }}"
    body = {"messages": USER, "documents": [{"text": "doc"}], "chat_template_kwargs": {"word": "yes"}}
    assert post(http, CHAT, **body, chat_template=template)["choices"][0]["message"]["content"] == "yes"
    assert post(http, CHAT, **body)["choices"][0]["message"]["content"] == "abc"
    tokens = http.post("/tokenize", json={**body, "chat_template": template}).json()["tokens"]
    assert tokens == token_ids(http, "doc<say>yes")
    assert error_of(http, CHAT, **body, chat_template="{% if %}")["param"] == "chat_template"


def test_the_model_s_defaults_apply_and_the_request_s_values_win(strict: tuple[httpx.Client, RunningServer]) -> None:
    http, _ = strict
    messages = [{"role": "user", "content": "<say>abcdefgh"}]

    def text(**body: Any) -> str:
        content: str = post(http, CHAT, messages=messages, **body)["choices"][0]["message"]["content"]
        return content

    assert text() == "abc"
    assert text(max_tokens=5) == "abcde"
    assert text(max_completion_tokens=20) == "abcdefgh"
    long = [{"role": "user", "content": "x" * 480}]
    room = 512 - http.post("/tokenize", json={"messages": long}).json()["count"]
    assert post(http, CHAT, messages=long, truncate_prompt_tokens=511)["usage"]["completion_tokens"] == min(3, room)


def test_a_role_that_the_template_drops_is_warned_of(strict: tuple[httpx.Client, RunningServer]) -> None:
    http, _ = strict
    messages = [{"role": "critic", "content": "Bad."}, *USER]
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    warned = http.post(CHAT, json={"messages": messages, "chat_template": template})
    assert warned.json()["choices"][0]["message"]["content"] == "abc"
    assert '"critic"' in warned.headers["x-octavo-warning"]
    assert "x-octavo-warning" not in http.post(CHAT, json={"messages": messages}).headers


def test_a_model_has_several_names(strict: tuple[httpx.Client, RunningServer]) -> None:
    http, _ = strict
    names = ["first", "second", "third/name"]
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == names
    for name in names:
        assert http.get(f"/v1/models/{name}").json()["id"] == name
        assert post(http, CHAT, messages=USER, model=name)["model"] == "first"
    assert post(http, TEXT, prompt="<say>x")["model"] == "first"
    assert http.post(TEXT, json={"prompt": "x", "model": "fourth"}).status_code == 404
    assert http.get("/v1/models/fourth").status_code == 404

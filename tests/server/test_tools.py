"""Tools and reasoning over HTTP: recorded outputs of each family, sent a byte a token, markers as special tokens."""

import json
import string
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from tests.server.running import RunningServer, make_tokenizer_folder, scripted
from tests.server.sse import chunks_of
from tests.text.model_outputs import FUNCTIONS, OUTPUTS

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<s>{{ m.role }}:{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
TRACES = {
    "hermes": "<tool_call></tool_call><think></think>",
    "json": "",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS][ARGS][CALL_ID]",
    "pythonic": "<|python_start|><|python_end|>",
}
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"]
MARKERS += ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in FUNCTIONS
]


def start(folder: Path, form: str) -> RunningServer:
    """A server whose template has what a template of this form has in it."""
    make_tokenizer_folder(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKERS)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE + "{# " + TRACES[form] + " #}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return scripted(folder, "--max-model-len", "2048")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningServer]]:
    """One for each form; they start side by side."""
    with ExitStack() as stack:
        servers = {form: stack.enter_context(start(tmp_path_factory.mktemp(form), form)) for form in TRACES}
        yield {form: server.wait_ready() for form, server in servers.items()}


@pytest.fixture(scope="module")
def families(servers: dict[str, RunningServer]) -> Iterator[dict[str, httpx.Client]]:
    with ExitStack() as stack:
        yield {
            form: stack.enter_context(httpx.Client(base_url=server.url, timeout=30)) for form, server in servers.items()
        }


@pytest.fixture(scope="module")
def hermes(families: dict[str, httpx.Client]) -> httpx.Client:
    return families["hermes"]


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "<say>" + text}]


def streamed(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas make, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"]
                assert call["type"] == "function"
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append((call["function"]["name"], ""))
            else:
                assert call.keys() == {"index", "function"}
                name, arguments = message["tool_calls"].pop()
                message["tool_calls"].append((name, arguments + call["function"]["arguments"]))
        message["finish_reason"] = choice["finish_reason"]
    return message


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "tool_calls": calls,
        "finish_reason": choice["finish_reason"],
    }


def both(http: httpx.Client, text: str, **fields: Any) -> dict[str, Any]:
    """The answer, which is the same streamed and whole."""
    body = {"messages": say(text), "tools": TOOLS} | fields
    answer = whole(http.post(PATH, json=body).json())
    assert streamed(chunks_of(http, PATH, **body)) == answer
    return answer


def test_the_start_says_which_forms_were_found(servers: dict[str, RunningServer]) -> None:
    assert "  reads tool calls as hermes writes them and reasoning as qwen3 writes it" in servers["hermes"].lines
    assert "  reads tool calls as mistral writes them" in servers["mistral"].lines


@pytest.mark.parametrize("form", TRACES)
def test_streamed_calls_are_the_whole_calls(families: dict[str, httpx.Client], form: str) -> None:
    outputs = [output for output in OUTPUTS.values() if form in output.form]
    assert outputs
    for output in outputs:
        answer = both(families[form], output.text)
        assert answer["tool_calls"] == list(output.calls)
        assert answer["content"] == output.content
        assert answer["finish_reason"] == ("tool_calls" if output.calls else "stop")


@pytest.mark.parametrize("form", TRACES)
def test_ids_of_calls_are_such_as_templates_take(families: dict[str, httpx.Client], form: str) -> None:
    output = OUTPUTS[{"llama3_json": "llama 3", "json": "generic"}.get(form, form)]
    answer = families[form].post(PATH, json={"messages": say(output.text), "tools": TOOLS}).json()
    ids = [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == len(output.calls)
    if form == "mistral":
        assert all(len(i) == 9 and set(i) <= {*string.ascii_letters, *string.digits} for i in ids)


def test_the_client_runs_a_conversation_with_calls(hermes: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{hermes.base_url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = say(OUTPUTS["hermes"].text)
        answer = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)  # type: ignore[call-overload]
        message = answer.choices[0].message
        messages += [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "<say>fine"} for call in message.tool_calls]
        answer = client.chat.completions.create(model="scripted", messages=messages)
        assert answer.choices[0].message.content == "fine"
        assert answer.choices[0].message.tool_calls is None


def prompt_of(http: httpx.Client, **fields: Any) -> str:
    tokens = http.post("/tokenize", json=fields).json()["tokens"]
    prompt: str = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    return prompt


def test_templates_get_tools_and_arguments_as_objects(hermes: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "é"}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    prompt = prompt_of(hermes, messages=messages, tools=TOOLS)
    assert prompt.startswith(json.dumps(TOOLS))
    assert '<s>assistant:(now {"zone": "é"})(hm)</s><s>tool:noon</s>' in prompt


def test_content_is_null_beside_calls_alone(hermes: httpx.Client) -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    message = hermes.post(PATH, json={"messages": say(text), "tools": TOOLS}).json()["choices"][0]["message"]
    assert message["content"] is None
    message = hermes.post(PATH, json={"messages": say("x"), "tools": TOOLS}).json()["choices"][0]["message"]
    assert message["content"] == "x"
    assert "tool_calls" not in message


def test_a_cut_call_says_length_and_has_what_there_is(hermes: httpx.Client) -> None:
    text = '<tool_call>{"name": "search", "arguments": {"q": "a long question"}}</tool_call>'
    answer = both(hermes, text, max_tokens=50)
    assert answer["finish_reason"] == "length"
    ((name, arguments),) = answer["tool_calls"]
    assert name == "search"
    assert arguments
    assert '{"q": "a long question"}'.startswith(arguments)


def test_without_parallel_calls_the_first_is_kept(hermes: httpx.Client) -> None:
    answer = both(hermes, OUTPUTS["hermes"].text, parallel_tool_calls=False)
    assert answer["tool_calls"] == list(OUTPUTS["hermes"].calls[:1])


def test_a_model_that_shall_call_nothing_is_shown_no_tools(hermes: httpx.Client) -> None:
    with_tools, without = (
        hermes.post(PATH, json={"messages": say("x"), "max_tokens": 1} | fields).json()["usage"]["prompt_tokens"]
        for fields in ({"tools": TOOLS, "tool_choice": "none"}, {})
    )
    assert with_tools == without
    answer = both(hermes, "<tool_call>{}", tool_choice="none")
    assert answer["tool_calls"] == []


def test_choices_have_calls_of_their_own(hermes: httpx.Client) -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    answer = hermes.post(PATH, json={"messages": say(text), "tools": TOOLS, "n": 2}).json()
    assert [len(choice["message"]["tool_calls"]) for choice in answer["choices"]] == [1, 2]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}])
def test_reasoning_goes_before_calls_and_content(hermes: httpx.Client, kwargs: dict[str, Any]) -> None:
    """Whether the model writes the first tag or the prompt does."""
    first = "" if kwargs else "<think>"
    text = first + '\nI wonder.\n</think>\n\nSo:\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    fields = {"messages": say(text + "</s>"), "chat_template_kwargs": kwargs}
    answer = both(hermes, "", **fields)
    assert answer == {
        "reasoning": "I wonder.",
        "content": "So:",
        "tool_calls": [("now", "{}")],
        "finish_reason": "tool_calls",
    }
    answer = both(hermes, "", **fields, include_reasoning=False, tools=None)
    assert answer["reasoning"] == ""
    assert answer["content"] == 'So:\n{"name": "now", "arguments": {}}'  # special tokens that nobody reads are left out


def test_logprobs_come_with_calls(hermes: httpx.Client) -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    chunks = chunks_of(hermes, PATH, messages=say(text), tools=TOOLS, logprobs=True)
    entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    answer = hermes.post(PATH, json={"messages": say(text), "tools": TOOLS, "logprobs": True}).json()
    assert entries == answer["choices"][0]["logprobs"]["content"]


def test_tools_that_the_template_does_not_show_are_warned_about(http: httpx.Client) -> None:
    response = http.post(PATH, json={"messages": say("x"), "tools": TOOLS})
    assert response.status_code == 200
    assert "chat template" in response.headers["x-octavo-warning"]


def test_former_functions_are_answered_with_a_function_call(hermes: httpx.Client) -> None:
    functions = [tool["function"] for tool in TOOLS]
    text = 'So: <tool_call>{"name": "now", "arguments": {"zone": "é"}}</tool_call>'
    body = {"messages": say(text), "functions": functions, "function_call": "auto"}
    (choice,) = hermes.post(PATH, json=body).json()["choices"]
    call = {"name": "now", "arguments": '{"zone": "é"}'}
    assert choice["message"]["function_call"] == call
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks_of(hermes, PATH, **body)]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["now"]
    assert "".join(delta.get("arguments", "") for delta in deltas) == call["arguments"]
    for nothing in ({"functions": [], "function_call": "none"}, {"functions": functions, "function_call": "none"}):
        answer = hermes.post(PATH, json={"messages": say(text), **nothing})
        assert answer.status_code == 200, answer.text
        assert "function_call" not in answer.json()["choices"][0]["message"]

"""Messages and tools of before, as clients and models write them."""

from typing import Any

import httpx
import pytest

from octavo.server.requests.messages import ChatInput, Message
from octavo.server.requests.tools import arguments_for_template

CHAT = "/v1/chat/completions"
SAY = {"role": "user", "content": "<say>x"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"city": "Paris"}', {"city": "Paris"}),
        ({"city": "Paris"}, {"city": "Paris"}),
        ("", {}),
        (None, {}),
        ("{'city': 'Paris', 'metric': True, 'day': None}", {"city": "Paris", "metric": True, "day": None}),
        ('{"city": "Par', {"city": "Par"}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("{", {}),
        ("[1]", "[1]"),
        ("5", "5"),
        ("Paris", "Paris"),
        ("__import__('os')", "__import__('os')"),
        ("[" * 100_000, "[" * 100_000),
        ("{'a': " * 5000, "{'a': " * 5000),
    ],
)
def test_arguments_are_an_object_if_they_can_be_read_as_one(written: Any, read: Any) -> None:
    assert arguments_for_template(written) == read


def test_an_octavo_answer_that_a_limit_cut_can_be_sent_back(http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}
    for message in (
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "refusal": "I can't."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": [call], "reasoning": None},
        {"role": "assistant", "content": None, "function_call": call["function"]},
        {"role": "function", "name": "f", "content": "sunny"},
        {"role": "developer", "content": "Be brief."},
    ):
        response = http.post(CHAT, json={"messages": [message, SAY]})
        assert response.status_code == 200, (message, response.text)
        assert response.json()["choices"][0]["message"]["content"] == "x"


def test_what_an_assistant_refused_with_is_its_content() -> None:
    parts = [{"type": "refusal", "refusal": "I can't."}]
    assert Message(role="assistant", content=None, refusal="No.").for_template()["content"] == "No."
    message = Message.model_validate({"role": "assistant", "content": parts})
    assert message.for_template()["content"] == [{"type": "text", "text": "I can't."}]
    assert message.text == "I can't."


def test_former_calls_become_calls_of_tools() -> None:
    message = Message.model_validate({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}})
    assert [call["function"] for call in message.for_template()["tool_calls"]] == [{"name": "f", "arguments": {}}]
    assert "function_call" not in message.for_template()
    assert Message(role="function", name="f", content="x").for_template()["role"] == "tool"
    request = ChatInput.model_validate({"functions": [{"name": "f", "parameters": CITY}]})
    assert request.template_tools == [{"type": "function", "function": {"name": "f", "parameters": CITY}}]


def test_efforts_reach_the_template_and_unknown_ones_are_refused(http: httpx.Client) -> None:
    assert ChatInput(reasoning_effort="low").template_variables == {"reasoning_effort": "low"}
    none = ChatInput(reasoning_effort="none", chat_template_kwargs={"a": 1})
    assert none.template_variables == {"reasoning_effort": "none", "enable_thinking": False, "a": 1}
    forced = ChatInput(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert forced.template_variables["enable_thinking"] is True
    assert http.post(CHAT, json={"messages": [SAY], "reasoning_effort": "high"}).status_code == 200
    response = http.post(CHAT, json={"messages": [SAY], "reasoning_effort": "giant"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning_effort")

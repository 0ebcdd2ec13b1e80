"""LangChain's ChatOpenAI: plain, streamed, with tools and with structured output."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, run
from tests.server.running import RunningServer

pytestmark = pytest.mark.clients


def test_langchain_chats_calls_tools_and_gets_structured_output(server: RunningServer) -> None:
    script = str(Path(__file__).with_name("langchain_client.py"))
    result = json.loads(run("lm", "python", script, f"{server.url}/v1", MODEL).splitlines()[-1])
    assert result["plain"]
    assert result["streamed"] == result["plain"]
    assert result["usage"]["input_tokens"] > 10
    (call,) = result["tool_calls"]
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)
    assert isinstance(call["args"]["days"], int)
    assert not result["invalid_tool_calls"]
    assert 0 <= result["person"]["age"] <= 150

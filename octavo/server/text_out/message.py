"""The shapes of a chat message: whole, and in deltas."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

__all__ = ["ChatMessage", "Delta", "FunctionCall", "FunctionDelta", "ToolCall", "ToolCallDelta"]


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    name: str | None = None
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first of a call has its id and its name, further ones more of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same: vLLM's and DeepSeek's former name."""
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionDelta | None = None
    """The one call of a request with `functions`."""


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """JSON, unless the limit cut it."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    """The one call of a request with `functions`."""

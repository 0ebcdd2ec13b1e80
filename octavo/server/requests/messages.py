"""ChatInput: the messages of a request, and how they become a prompt. For chat completions and /tokenize."""

from typing import Any, Literal

from octavo.errors import InvalidRequestError
from octavo.server.requests.fields import ApiRequest, Fields
from octavo.server.requests.tools import (
    CalledFunction,
    FunctionDefinition,
    MessageCall,
    Tool,
    arguments_for_template,
)

__all__ = ["ChatInput", "ContentPart", "Message"]


class ContentPart(Fields):
    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """None for an image or another part that octavo can't read."""
        return {"text": self.text, "refusal": self.refusal}.get(self.type)


class Message(Fields):
    """Fields beside these reach the chat template as they are."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    """What an assistant said in place of content."""
    tool_calls: list[MessageCall] | None = None
    function_call: CalledFunction | None = None
    """The one call, in OpenAI's former way."""
    tool_call_id: str | None = None
    """The call that a message with the role "tool" answers."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same, as templates know it."""

    @property
    def text(self) -> str:
        """The content's parts joined."""
        if isinstance(self.content, list):
            return "".join(part.words or "" for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        message = self.model_dump(exclude_unset=True, exclude={"function_call", "refusal", "content"})
        if isinstance(self.content, list):
            message["content"] = [{"type": "text", "text": part.words} for part in self.content]
        else:
            message["content"] = self.refusal if self.content is None else self.content
        if self.function_call is not None and not self.tool_calls:
            message["tool_calls"] = [MessageCall(type="function", function=self.function_call).model_dump()]
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = arguments_for_template(call["function"].get("arguments"))
        if self.role == "function":
            message["role"] = "tool"
        if (reasoning := self.reasoning_content or self.reasoning) is not None:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return message


class ChatInput(ApiRequest):
    """Messages and how they become a prompt. Parts of other types than text are refused here: a template might drop
    them in silence."""

    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    """Instead of the model's own, where the server allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template; "none" also turns thinking off where templates know `enable_thinking`."""
    tools: list[Tool] | None = None
    functions: list[FunctionDefinition] | None = None
    """Tools, in OpenAI's former way."""

    def check_parts(self) -> None:
        """Raises InvalidRequestError for an image or another part that octavo can't read."""
        for i, message in enumerate(self.messages or ()):
            for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if part.words is None:
                    raise InvalidRequestError(
                        f"messages[{i}].content[{j}] must be of type 'text' and have a text, got {part.type[:50]!a}: "
                        "octavo reads text alone.",
                        param="messages",
                    )

    @property
    def all_tools(self) -> list[Tool]:
        return [*(self.tools or ()), *(Tool(function=function) for function in self.functions or ())]

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """None without any: that is what templates look for."""
        tools = [{"type": "function"} | tool.model_dump(exclude_unset=True) for tool in self.all_tools]
        return tools or None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Raises InvalidRequestError for variables that have a field of their own."""
        given = self.chat_template_kwargs or {}
        taken = {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents", "self"}
        if clash := taken & given.keys():
            raise InvalidRequestError(
                f"chat_template_kwargs can't set {min(clash)}: it has a field of its own.", param="chat_template_kwargs"
            )
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        thinking = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return effort | thinking | given

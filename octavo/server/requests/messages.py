"""ChatInput: the messages of a request, and how they become a prompt. For chat completions and /tokenize."""

from typing import Any

from octavo.errors import InvalidRequestError
from octavo.server.requests.fields import ApiRequest, Fields
from octavo.server.requests.tools import MessageCall, Tool, arguments_for_template

__all__ = ["ChatInput", "ContentPart", "Message"]


class ContentPart(Fields):
    type: str
    text: str | None = None


class Message(Fields):
    """Fields beside these reach the chat template as they are."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    """Of a message with the role "tool": the call it answers."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same, as templates know it."""

    @property
    def text(self) -> str:
        """The content's parts joined."""
        return (
            "".join(part.text or "" for part in self.content) if isinstance(self.content, list) else self.content or ""
        )

    def for_template(self, where: str) -> dict[str, Any]:
        """Raises InvalidRequestError naming `where` the arguments of a call are no JSON object."""
        message = self.model_dump(exclude_unset=True)
        for i, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            place = f"{where}.tool_calls[{i}].function.arguments"
            function["arguments"] = arguments_for_template(function.get("arguments"), place)
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
    tools: list[Tool] | None = None

    def check_parts(self) -> None:
        """Raises InvalidRequestError for an image or another part that octavo can't read."""
        for i, message in enumerate(self.messages or ()):
            for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if part.type != "text" or part.text is None:
                    raise InvalidRequestError(
                        f"messages[{i}].content[{j}] must be of type 'text' and have a text, got {part.type[:50]!a}: "
                        "octavo reads text alone.",
                        param="messages",
                    )

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """None without any: that is what templates look for."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()] or None

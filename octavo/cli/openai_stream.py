"""The parts of an OpenAI server's answers that the command line reads, for completions and chat completions alike."""

import msgspec

from octavo.cli.http_client import ServerError

__all__ = ["Event", "decode_event", "first_model"]


class Delta(msgspec.Struct, frozen=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: Delta = Delta()
    finish_reason: str | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Error(msgspec.Struct, frozen=True):
    message: str = "unknown error"


class Event(msgspec.Struct, frozen=True):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Error | None = None

    @property
    def has_tokens(self) -> bool:
        """False for an event that only opens an answer, ends it, or carries usage."""
        if not self.choices:
            return False
        choice = self.choices[0]
        return bool(self.text) or (choice.finish_reason is None and choice.delta.role is None)

    @property
    def text(self) -> str:
        """The text of the first choice."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        return choice.text or choice.delta.content or choice.delta.reasoning_content or ""


class _Model(msgspec.Struct, frozen=True):
    id: str


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_Model]


_EVENT = msgspec.json.Decoder(Event)
_MODELS = msgspec.json.Decoder(_ModelList)


def decode_event(data: bytes) -> Event:
    """Raises ServerError for what is no event, and for an event that reports an error."""
    try:
        event = _EVENT.decode(data)
    except msgspec.DecodeError as error:
        raise ServerError(f"The server sent {data[:200]!r}: {error}.") from error
    if event.error is not None:
        raise ServerError(event.error.message)
    return event


def first_model(body: bytes) -> str:
    """The first name in the answer of /v1/models. Raises ServerError if there is none."""
    try:
        return _MODELS.decode(body).data[0].id
    except (msgspec.DecodeError, IndexError) as error:
        raise ServerError(f"The server lists no model: {body[:200]!r}. Name one with --model.") from error

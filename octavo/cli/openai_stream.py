"""The parts of OpenAI's streaming answers that the command line reads, for completions and chat completions alike."""

import msgspec

__all__ = ["Event", "Model", "ModelList", "decode_event", "decode_models"]


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


class Model(msgspec.Struct, frozen=True):
    id: str


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]


decode_event = msgspec.json.Decoder(Event).decode
decode_models = msgspec.json.Decoder(ModelList).decode

"""Reasoning that a model writes before its answer, between a pair of tags; names are those of vLLM's parsers."""

from dataclasses import dataclass

from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import PartSink

__all__ = ["REASONING_FORMATS", "ReasoningFormat", "find_reasoning_format", "read_reasoning"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False
    """The model reasons from its first token, whether the first tag is there or not."""

    def is_opened_by(self, prompt: str) -> bool:
        """Whether an answer to `prompt`, of which the end will do, begins within the reasoning."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.start) or (self.is_open and not prompt.endswith(self.end))

    def is_open_after(self, beginning: str) -> bool:
        """Whether an answer that has begun so goes on within the reasoning."""
        return beginning.rfind(self.start) > beginning.rfind(self.end)


REASONING_FORMATS = {
    form.name: form
    for form in (
        ReasoningFormat("deepseek_r1", is_open=True),
        ReasoningFormat("deepseek_v3"),
        ReasoningFormat("glm45"),
        ReasoningFormat("minimax_m2", is_open=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("olmo3"),
        ReasoningFormat("qwen3"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningFormat("step3", is_open=True),
    )
}
_FOUND_BY_END_TAG = ("qwen3", "mistral", "seed_oss")


def find_reasoning_format(forced: str | None, chat_template: str | None) -> ReasoningFormat | None:
    """The format that `forced` names ("none" for none), otherwise the one whose last tag is in the template."""
    if forced is not None:
        return REASONING_FORMATS.get(forced)
    formats = (REASONING_FORMATS[name] for name in _FOUND_BY_END_TAG)
    return next((form for form in formats if form.end in (chat_template or "")), None)


def read_reasoning(source: Source, sink: PartSink, form: ReasoningFormat, is_open: bool) -> Steps[None]:
    """Read the reasoning at the start of an answer, if there is any, and the white space around it.

    A tag further on is content: a model may write about tags.
    """
    space = yield from source.space()
    if not (yield from source.literal(form.start)) and not is_open:
        sink.content(space)
        return
    yield from source.space()
    yield from source.until(form.end, sink.reasoning)
    source.release()
    yield from source.space()

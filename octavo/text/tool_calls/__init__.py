"""The ways models write tool calls, and which of them a chat template teaches.

Names are those of vLLM's --tool-call-parser.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import PartSink
from octavo.text.tool_calls import bare, hermes, mistral

__all__ = ["TOOL_FORMATS", "ToolFormat", "find_tool_format"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    read: Callable[[Source, PartSink, Collection[str]], Steps[None]]
    """Reads to the end of the text. The names are those of the functions that can be called."""
    markers: tuple[str, ...] = ()
    """Texts that can be special tokens, and that `read` must see nevertheless."""
    has_short_ids: bool = False
    """Mistral's templates refuse ids of calls that are not nine letters or digits."""


_PYTHON_MARKERS = (bare.PYTHON_START, bare.PYTHON_END)
TOOL_FORMATS = {
    form.name: form
    for form in (
        ToolFormat("hermes", hermes.read_hermes, (hermes.START, hermes.END)),
        ToolFormat("json", bare.read_json),
        ToolFormat("llama3_json", bare.read_llama_json, (bare.PYTHON_TAG,)),
        ToolFormat("llama4_json", bare.read_llama_json, (bare.PYTHON_TAG,)),
        ToolFormat("llama4_pythonic", bare.read_pythonic, _PYTHON_MARKERS),
        ToolFormat(
            "mistral", mistral.read_mistral, (mistral.START, mistral.CALL_ID, mistral.ARGUMENTS), has_short_ids=True
        ),
        ToolFormat("pythonic", bare.read_pythonic, _PYTHON_MARKERS),
    )
}

_TRACES = (  # the first that is found decides; "" is a form that octavo can't read
    ("", re.compile(r"<function=|<arg_key>|<\|tool_calls_section_begin\|>|<｜tool▁calls▁begin｜>")),
    ("mistral", re.compile(re.escape(mistral.START))),
    ("hermes", re.compile(hermes.START)),
    ("pythonic", re.compile(r"\[\w+\(\w+\s*=|" + re.escape(bare.PYTHON_START))),
    ("llama3_json", re.compile(re.escape(bare.PYTHON_TAG))),
    ("llama3_json", re.compile(r"\btools\b.*<\|eot_id\|>", re.DOTALL)),
    ("json", re.compile(r"\btools\b")),
)
"""What a chat template that teaches a form has in it."""


def find_tool_format(forced: str | None, chat_template: str | None) -> ToolFormat | None:
    """The form that `forced` names ("none" for none), otherwise the one whose traces are in the template."""
    if forced is not None:
        return TOOL_FORMATS.get(forced)
    found = next((name for name, trace in _TRACES if trace.search(chat_template or "")), "")
    return TOOL_FORMATS.get(found)

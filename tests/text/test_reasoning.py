"""Reasoning and the answer after it, however the text is cut: no tag leaks into either."""

from collections.abc import Iterable

import pytest

from octavo.text.incremental import Source, Steps
from octavo.text.message_parts import Content, PartSink, Reasoning
from octavo.text.output_parser import OutputParser, read_content
from octavo.text.reasoning import REASONING_FORMATS, find_reasoning_format, read_reasoning

PROMPT, OPEN_PROMPT, CLOSED_PROMPT = "<user>Hi<assistant>", "<assistant><think>\n", "<assistant><think>\n\n</think>\n\n"


def parse(name: str, pieces: Iterable[str], prompt: str = PROMPT) -> tuple[str, str]:
    form = REASONING_FORMATS[name]

    def read(source: Source, sink: PartSink) -> Steps[None]:
        yield from read_reasoning(source, sink, form, form.is_opened_by(prompt))
        yield from read_content(source, sink)

    parser = OutputParser(read)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    texts = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Reasoning, Content))
    reasoning, content = texts
    return reasoning, content


CASES = [
    ("qwen3", PROMPT, "<think>\nWell, 1 < 2.\n</think>\n\nYes.\n", ("Well, 1 < 2.", "Yes.\n")),
    ("qwen3", OPEN_PROMPT, "Well.\n\nOr so.</think>Yes.", ("Well.\n\nOr so.", "Yes.")),
    ("qwen3", OPEN_PROMPT, "<think>Well.</think>Yes.", ("Well.", "Yes.")),
    ("qwen3", CLOSED_PROMPT, "Yes, <think> is a tag.", ("", "Yes, <think> is a tag.")),
    ("qwen3", PROMPT, " Yes.</th", ("", " Yes.</th")),
    ("qwen3", PROMPT, "<think>\n\n</think>\n\nYes.", ("", "Yes.")),
    ("qwen3", PROMPT, "<think>never done </thi", ("never done </thi", "")),
    ("qwen3", PROMPT, "<thing>", ("", "<thing>")),
    ("qwen3", PROMPT, "<think>a</think>the </think> tag", ("a", "the </think> tag")),
    ("deepseek_r1", PROMPT, "Well.</think>Yes.", ("Well.", "Yes.")),
    ("deepseek_r1", PROMPT, "<think>Well.</think>Yes.", ("Well.", "Yes.")),
    ("deepseek_r1", CLOSED_PROMPT, "Yes.", ("", "Yes.")),
    ("mistral", PROMPT, "[THINK]Well.[/THINK]Yes.", ("Well.", "Yes.")),
]


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), CASES)
def test_a_split_at_any_character_changes_nothing(name: str, prompt: str, text: str, expected: tuple[str, str]) -> None:
    for i in range(len(text) + 1):
        assert parse(name, [text[:i], text[i:]], prompt) == expected
    assert parse(name, text, prompt) == expected


def test_the_format_is_found_from_the_template() -> None:
    found = find_reasoning_format(None, "{{ content.split('</think>')[-1] }}")
    assert found is REASONING_FORMATS["qwen3"]
    assert find_reasoning_format("deepseek_r1", None) is REASONING_FORMATS["deepseek_r1"]
    assert find_reasoning_format("none", "</think>") is None
    assert find_reasoning_format(None, "{{ messages }}") is None

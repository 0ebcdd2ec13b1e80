"""Tool calls of every family, however the text is cut."""

import json
from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.message_parts import CallArguments, CallStart, Content, Part
from octavo.text.output_parser import OutputParser, Read
from octavo.text.tool_calls import TOOL_FORMATS, find_tool_format
from octavo.text.tool_calls.forced import read_named_arguments, read_required_calls
from tests.text.model_outputs import FUNCTIONS, OUTPUTS, Output


def reader(form: str) -> Read:
    return partial(TOOL_FORMATS[form].read, names=FUNCTIONS)


def parts_of(parser: OutputParser, pieces: Iterable[str]) -> list[Part]:
    return [part for piece in pieces for part in parser.feed(piece)] + parser.finish()


def message_of(parts: Iterable[Part]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls; asserts that the parts of a call follow its start."""
    content, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case Content(text):
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=list(OUTPUTS))
def test_a_message_is_taken_apart(output: Output) -> None:
    assert message_of(parts_of(OutputParser(reader(output.form)), [output.text])) == (
        output.content,
        output.calls or [],
    )


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=list(OUTPUTS))
def test_a_split_at_any_character_changes_nothing(output: Output) -> None:
    expected = output.content, output.calls or []
    text = output.text
    for i in range(len(text) + 1):
        assert message_of(parts_of(OutputParser(reader(output.form)), [text[:i], text[i:]])) == expected
    assert message_of(parts_of(OutputParser(reader(output.form)), text)) == expected


@pytest.mark.parametrize("name", [name for name in OUTPUTS if "cut" not in name])
def test_arguments_of_complete_calls_are_json_objects(name: str) -> None:
    for _, arguments in OUTPUTS[name].calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("form", TOOL_FORMATS)
@given(data=st.data())
def test_no_text_is_lost_twice_or_too_much(form: str, data: st.DataObject) -> None:
    """Fragments of calls in any order: a parser ends well, and split and whole text agree."""
    fragments = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "{",
        "}",
        "[",
        "]",
        '"',
        ",",
    ]
    fragments += [
        '"name": "now"',
        '"arguments": ',
        '{"name": "now"}',
        "now(",
        "now",
        "a=1",
        ")",
        "\n",
        " ",
        "x",
        "\\",
        ";",
    ]
    pieces = data.draw(st.lists(st.sampled_from(fragments), max_size=20))
    text = "".join(pieces)
    whole = message_of(parts_of(OutputParser(reader(form)), [text]))
    assert message_of(parts_of(OutputParser(reader(form)), text)) == whole
    if not whole[1] and "python" not in form and not form.startswith("llama"):
        assert whole[0] == text


def test_arguments_are_sent_before_they_are_complete() -> None:
    parser = OutputParser(reader("hermes"))
    assert parser.feed('<tool_call>{"name": "search", "arguments": {"q": "a lo') == [
        CallStart(0, "search"),
        CallArguments(0, '{"q": "a lo'),
    ]
    assert parser.feed("ng quest") == [CallArguments(0, "ng quest")]


def test_json_that_is_the_answer_is_not_held_back() -> None:
    parser = OutputParser(reader("llama3_json"))
    assert parser.feed('{"title": "A long') == [Content('{"title": "A long')]
    assert parser.feed(" story") == [Content(" story")]


def test_further_calls_than_asked_for_are_left_out() -> None:
    output = OUTPUTS["hermes"]
    parser = OutputParser(reader("hermes"), max_calls=1)
    assert message_of(parts_of(parser, output.text)) == (output.content, output.calls[:1])
    assert parser.num_calls == 1


def test_nesting_has_a_limit() -> None:
    text = '<tool_call>{"name": "now", "arguments": ' + '{"a": ' * 5000
    content, calls = message_of(parts_of(OutputParser(reader("hermes")), [text]))
    assert calls[0][0] == "now"
    assert content.startswith('{"a": ')


def test_a_named_call_s_text_is_its_arguments() -> None:
    parser = OutputParser(partial(read_named_arguments, name="now"))
    assert message_of(parts_of(parser, '{"zone": "UTC"}')) == ("", [("now", '{"zone": "UTC"}')])


def test_required_calls_are_an_array() -> None:
    text = '[{"name": "now", "parameters": {}}, {"name": "search", "parameters": {"q": "x"}}]'
    calls = [("now", "{}"), ("search", '{"q": "x"}')]
    assert message_of(parts_of(OutputParser(read_required_calls), text)) == ("", calls)


TEMPLATES = {
    "{% if tools %}<tool_call>{{ tools | tojson }}": "hermes",
    "{{ '<tool_call>\n<function=' }}{{ tools }}": None,
    "{{ '[AVAILABLE_TOOLS]' + tools }}[TOOL_CALLS]": "mistral",
    "{% if builtin_tools %}<|python_tag|>{% endif %}{{ tools }}": "llama3_json",
    "{% for tool in tools %}{{ tool | tojson }}<|eot_id|>": "llama3_json",
    "{{ tools }} [func_name1(params_name1=params_value1, params_name2=params_value2...)]": "pythonic",
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}": "json",
    "{% for m in messages %}{{ m.content }}{% endfor %}": None,
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_the_form_is_found_from_the_template(template: str, name: str | None) -> None:
    found = find_tool_format(None, template)
    assert (found and found.name) == name


def test_a_forced_form_goes_before_the_template() -> None:
    template = next(iter(TEMPLATES))
    assert find_tool_format("json", template) is TOOL_FORMATS["json"]
    assert find_tool_format("none", template) is None
    assert find_tool_format(None, None) is None

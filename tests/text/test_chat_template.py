"""Chat templates against transformers' rendering."""

import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, InvalidRequestError
from octavo.text.chat_template import ChatTemplate, load_chat_template
from octavo.text.tokenizer import Tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi <b>there</b> 'you' & \"me\" 😀 "},
    {"role": "assistant", "content": "Hello.\n"},
    {"role": "user", "content": "Go on."},
]
TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "time", "arguments": {"zone": "Zürich <UTC>"}}}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    {"role": "tool", "content": "noon", "tool_call_id": "1"},
]
TOOLS = [
    {"type": "function", "function": {"name": "time", "description": "the <time>", "parameters": {"é": [1, None]}}}
]

TEMPLATES = {
    "plain": "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}",
    "whitespace": """
        {%- for message in messages %}
            {% if message.role == 'user' %}
    <|user|>
    {{ message.content | trim }}
            {% else %}
    <|other|>{{ message.content }}
            {% endif %}
        {% endfor %}
        {%- if add_generation_prompt -%} <|assistant|> {% endif %}
    """,
    "namespace_and_loop": """
        {%- set ns = namespace(turns=0, system='') -%}
        {%- for m in messages -%}
            {%- if m.role == 'system' -%}{%- set ns.system = m.content -%}{%- continue -%}{%- endif -%}
            {%- if ns.turns > 1 -%}{%- break -%}{%- endif -%}
            {%- set ns.turns = ns.turns + 1 -%}
            [{{ loop.index }}/{{ loop.length }} {{ 'first' if loop.first }} {{ m.content[:5] }}
            {{- m.content.split()[0] }}]
        {%- endfor -%}
        {{ ns.system | upper }} {{ ns.turns }}
    """,
    "tools": """
        {%- if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=4) }}
        {%- for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}
        {%- for m in messages %}
            {%- if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}
            {%- elif m.content is defined %}{{ m.role }}={{ m.content }};{% endif %}
        {%- endfor %}""",
    "generation": """{% for m in messages %}{% set mark = 'o' %}
        {%- if m.role == 'assistant' %}{% generation %}
            {%- set mark = 'i' %}{{ m.content }}{{ mark }}{{ loop.index }}{% endgeneration %}
        {%- endif %}{{ mark }}{% endfor %}""",
    "documents": "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}\n{% endfor %}{{ messages[-1].content }}",
    "undefined": "{{ nothing }}|{{ messages[0].nothing }}|{{ enable_thinking is defined }}|{{ pad_token }}",
    "keywords": "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ bos_token }}",
    "macros": """{% macro say(m) %}<{{ m.role }}>{{ caller() }}{% endmacro %}
        {%- for m in messages %}{% call say(m) %}{{ m.content }}{% endcall %}{% endfor %}""",
    "dictionaries": """{% set d = dict(a=1) %}{{ d | tojson }}{{ messages[0].items() | list }}
        {{- {'b': [1, 2.5, none, true]} | tojson(sort_keys=true) }}""",
}


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    text: str = render_jinja_template([messages], chat_template=source, **TOKENS | options)[0][0]
    return text


OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"tools": TOOLS, "documents": [{"title": "T", "text": "<x>"}], "add_generation_prompt": True},
    {"enable_thinking": False, "bos_token": "<other>", "add_generation_prompt": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str, options: dict[str, Any]) -> None:
    source = TEMPLATES[name]
    assert ChatTemplate(source, TOKENS).render(CHAT, **options) == reference(source, CHAT, **options)


def test_absent_fields_are_dropped_as_transformers_does() -> None:
    without_none = [{key: value for key, value in message.items() if value is not None} for message in TOOL_CHAT]
    source = TEMPLATES["tools"]
    expected = reference(source, without_none, tools=TOOLS, add_generation_prompt=True)
    assert ChatTemplate(source, TOKENS).render(TOOL_CHAT, tools=TOOLS) == expected


@pytest.mark.parametrize("chat", [CHAT, CHAT[1:]], ids=["system", "no system"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_smollm_renders_as_transformers_does(
    smollm: Tokenizer, chat: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    assert smollm.chat_template is not None
    prompt = ChatTemplate(smollm.chat_template, smollm.special_tokens).render(chat, add_generation_prompt)
    assert prompt == reference(smollm.chat_template, chat, add_generation_prompt=add_generation_prompt)
    token_ids = smollm.encode(prompt, add_special_tokens=False)
    assert token_ids[0] == smollm.bos_token_id
    assert smollm.bos_token_id != token_ids[1]


CONTINUED = {
    "kept": "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}",
    "stripped": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}",
    "parts": "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}<end>{% endfor %}",
}


@pytest.mark.parametrize("content", ["Sure, ", "Sure", " a\n\n", "<user>Go on.<end>"])
@pytest.mark.parametrize("name", CONTINUED)
def test_the_final_message_is_continued_as_transformers_does(name: str, content: str) -> None:
    final: str | list[dict[str, str]] = content if name != "parts" else [{"type": "text", "text": content}]
    others = CHAT if name != "parts" else []
    chat = [*others, {"role": "assistant", "content": final}]
    source = CONTINUED[name]
    prompt = ChatTemplate(source, TOKENS).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert prompt == reference(source, chat, continue_final_message=True)
    assert prompt.rstrip().endswith(content.strip())


def test_a_final_message_that_cannot_be_continued_is_refused() -> None:
    template = ChatTemplate("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", TOKENS)
    with pytest.raises(InvalidRequestError, match="leaves the last message out"):
        template.render(CHAT, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="no text to go on with"):
        template.render(TOOL_CHAT[:2], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="can't both be true"):
        template.render(CHAT, continue_final_message=True)


def test_rendering_changes_no_message_of_the_callers() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    ChatTemplate(CONTINUED["parts"], TOKENS).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert chat == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", "one\ntwo"),
        ("{% for m in messages %}{% for word in m.content.split() %}{{ word }},{% endfor %}{% endfor %}", "one,two,"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }},{% endfor %}{% endfor %}", "one,two,"),
        (
            "{% set c = messages[0].content %}{% for p in c | list %}{{ p.text }};{% endfor %}",
            "one;two;",
        ),
        (
            "{% macro f(c) %}{% for p in c %}{{ p.text }}.{% endfor %}{% endmacro %}{{ f(messages[0].content) }}",
            "one.two.",
        ),
    ],
)
def test_parts_are_joined_unless_the_template_goes_through_them(source: str, expected: str) -> None:
    assert ChatTemplate(source, TOKENS).render(PARTS) == expected


def test_a_part_that_is_no_text_is_refused_by_a_text_template() -> None:
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(InvalidRequestError, match="'image_url'"):
        ChatTemplate("{{ messages[0].content }}", TOKENS).render(chat)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "Roles must alternate!"),
        ("{{ messages[0].content.missing.deeper }}", "has no attribute 'missing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "attribute 'append' of 'list' object is unsafe"),
    ],
)
def test_a_template_that_fails_is_the_requests_fault_in_the_templates_own_words(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as raised:
        ChatTemplate(source, TOKENS).render(CHAT)
    assert raised.value.param == "messages"


def test_further_variables_replace_special_tokens_but_not_the_chat() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ mood }}", TOKENS)
    variables: dict[str, Any] = {"bos_token": "<b>", "messages": [], "self": "x", "mood": "!"}
    assert template.render([{"role": "user", "content": "hi"}], **variables) == "<b>hi!"


def test_the_clock_is_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", TOKENS, now=lambda: datetime(2024, 7, 26))
    assert template.render(CHAT) == "26 July 2024"


def test_a_model_without_a_template_names_the_option() -> None:
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        ChatTemplate(None, TOKENS).render(CHAT)


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one message"):
        ChatTemplate("x", TOKENS).render([])


def test_a_syntax_error_names_the_line_and_the_option() -> None:
    with pytest.raises(ConfigError, match=r"line 2.*--chat-template"):
        ChatTemplate("ok\n{% for %}", TOKENS)


def test_the_option_takes_a_file_or_a_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }} é", encoding="utf-8")
    assert load_chat_template(str(file)) == "{{ messages }} é"
    assert load_chat_template("{{ messages }}" * 1000) == "{{ messages }}" * 1000
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        load_chat_template("missing.jinja")


def test_importing_the_module_does_not_import_jinja2_or_torch() -> None:
    code = "import sys, octavo.text.chat_template; sys.exit(bool({'jinja2', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
NONE_MEANS_A_CALL = (
    "{% for m in messages %}{% if m.content is none %}[call]{% else %}{{ m.content + ';' }}{% endif %}{% endfor %}"
)
KNOWN_ROLES = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }};{% endfor %}"
ITEMS = "{% for m in messages %}{% for c in m.tool_calls %}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"  # noqa: E501


def rendered(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(source, TOKENS).render(messages, add_generation_prompt=False)


@pytest.mark.parametrize("absent", [{"content": None}, {}])
def test_absent_content_is_what_the_template_can_take(absent: dict[str, Any]) -> None:
    message = {"role": "assistant", **absent}
    assert rendered(CHATML, message) == "<|im_start|>assistant\n<|im_end|>"
    assert rendered(NONE_MEANS_A_CALL, message) == "[call]"
    assert rendered("{{ messages[0].content }}|{{ messages[0].content | trim }}", message) == "|"
    aliased = "{% set c = messages[0]['content'] %}{% if c != none %}{{ c + '.' }}{% endif %}"
    assert rendered(aliased, message) == ""
    mistaken = "{% if messages[0].content is none %}{% endif %}{{ messages[0].content + '.' }}"
    assert rendered(mistaken, message) == "."


def test_arguments_that_are_no_object_are_handed_over_as_the_template_can_take_them() -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no JSON"}}]}
    assert rendered(CHATML, message).endswith('("no JSON")')
    assert rendered(ITEMS, message) == "arguments=no JSON;"


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    message = {"role": "developer", "content": "x"}
    assert rendered(CHATML, message) == "<|im_start|>system\nx<|im_end|>"
    knows = "{% if messages[0].role == 'developer' %}D{% endif %}"
    assert rendered(knows, message) == "D"


def test_a_template_says_which_roles_it_drops() -> None:
    assert ChatTemplate(CHATML, TOKENS).shows("tool")
    assert ChatTemplate(KNOWN_ROLES, TOKENS).shows("user")
    assert not ChatTemplate(KNOWN_ROLES, TOKENS).shows("tool")
    assert ChatTemplate("{{ raise_exception('no') }}", TOKENS).shows("tool")
    first_only = "{% if messages[0].role == 'critic' %}{{ messages[0].content }}{% endif %}"
    assert ChatTemplate(first_only, TOKENS).shows("critic")

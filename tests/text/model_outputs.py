"""What models of each family write when they call functions, and the message that it stands for."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FUNCTIONS", "OUTPUTS", "Output"]

FUNCTIONS = ("get_weather", "search", "now")


@dataclass(frozen=True)
class Output:
    form: str
    text: str
    calls: Sequence[tuple[str, str]] = ()
    content: str = ""


OUTPUTS = {
    "hermes": Output(
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🌦", "days": [1, -2.5e3, '
        'null]}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("get_weather", '{"city": "Zürich 🌦", "days": [1, -2.5e3, null]}'), ("now", "{}")],
        "Let me look.",
    ),
    "hermes, arguments first": Output(
        "hermes",
        '<tool_call>{"arguments": {"q": "\\u00e9 \\"<tool_call>\\" {}"}, "name": "search"}</tool_call> done',
        [("search", '{"q": "\\u00e9 \\"<tool_call>\\" {}"}')],
        " done",
    ),
    "hermes, null and absent arguments": Output(
        "hermes",
        '<tool_call>{"name": "now", "arguments": null}</tool_call><tool_call>{"name": "now"}</tool_call>',
        [("now", "{}"), ("now", "{}")],
    ),
    "hermes, arguments in a string": Output(
        "hermes",
        '<tool_call>{"name": "search", "arguments": "{\\"q\\": \\"a b\\"}"}</tool_call>',
        [("search", '{"q": "a b"}')],
    ),
    "hermes, text on both sides": Output(
        "hermes",
        'First.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n\nThen.\n',
        [("now", "{}")],
        "First.\n\n\n\n\nThen.",
    ),
    "hermes, two objects in one tag": Output(
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>',
        [("now", "{}"), ("now", '{"zone": "UTC"}')],
    ),
    "hermes, no end tag": Output("hermes", '<tool_call>{"name": "now", "arguments": {}}', [("now", "{}")]),
    "hermes, slips in strings": Output(
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"q": "it\\\'s\n\\d+\\u12"}}</tool_call>',
        [("search", '{"q": "it\'s\\n\\\\d+\\\\u12"}')],
    ),
    "hermes, a tag that begins no call": Output(
        "hermes",
        "Use <tool_call> like <tool_call>{this} or <tool",
        (),
        "Use <tool_call> like <tool_call>{this} or <tool",
    ),
    "hermes, an object without a name": Output(
        "hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', (), '<tool_call>{"arguments": {"a": 1}}</tool_call>'
    ),
    "hermes, no call": Output("hermes", "2 < 3 and 3 > 2.\n\n", (), "2 < 3 and 3 > 2.\n\n"),
    "hermes, cut in the arguments": Output(
        "hermes", '<tool_call>{"name": "search", "arguments": {"q": "long', [("search", '{"q": "long')]
    ),
    "llama 3": Output(
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        [("get_weather", '{"city": "Oslo"}')],
    ),
    "llama 3, with the tag and several": Output(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "search", "parameters": {"q": "a;b"}}; '
        '{"name": "now", "parameters": null}',
        [("search", '{"q": "a;b"}'), ("now", "{}")],
    ),
    "llama 3, after text": Output(
        "llama3_json",
        'I will look.\n\n{"name": "search", "parameters": {"q": "x"}}\nWait.',
        [("search", '{"q": "x"}')],
        "I will look.\n\n\nWait.",
    ),
    "llama 3, JSON that is the answer": Output(
        "llama3_json",
        '{"name": "Bob", "age": 3}\n[1, 2] {"x": {}} []\n[]',
        (),
        '{"name": "Bob", "age": 3}\n[1, 2] {"x": {}} []\n[]',
    ),
    "llama 3, code after the tag": Output("llama3_json", "<|python_tag|>print(1)", (), "print(1)"),
    "mistral": Output(
        "mistral",
        'Sure.[TOOL_CALLS] [{"name": "search", "arguments": {"q": "[1]"}}, {"name": "now", "arguments": {}}]',
        [("search", '{"q": "[1]"}'), ("now", "{}")],
        "Sure.",
    ),
    "mistral, named": Output(
        "mistral",
        '[TOOL_CALLS]search[ARGS]{"q": "x"}[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]now{"zone": "UTC"}',
        [("search", '{"q": "x"}'), ("now", "{}"), ("now", '{"zone": "UTC"}')],
    ),
    "mistral, no call": Output("mistral", "[TOOL_CALLS] are [TOOL", (), "[TOOL_CALLS] are [TOOL"),
    "pythonic": Output(
        "pythonic",
        "[get_weather(city='Oslo', days=[1, -2], exact=True, unit=None), search(q=\"a, (b) 'c' \\\"d\\\"\"), now()]",
        [
            ("get_weather", '{"city": "Oslo", "days": [1, -2], "exact": true, "unit": null}'),
            ("search", '{"q": "a, (b) \'c\' \\"d\\""}'),
            ("now", "{}"),
        ],
    ),
    "pythonic, in tags": Output(
        "llama4_pythonic",
        "Hm.\n<|python_start|>[search(q={'a': true, \"b\": {}})]<|python_end|>",
        [("search", '{"q": {"a": true, "b": {}}}')],
        "Hm.",
    ),
    "pythonic, no calls": Output(
        "pythonic",
        "[1, 2]\n[search(5)]\n[other(a=1)]\n[search(q=f(x))",
        (),
        "[1, 2]\n[search(5)]\n[other(a=1)]\n[search(q=f(x))",
    ),
    "pythonic, a bad second call": Output(
        "pythonic", "[now(), search(q=open('x'))] end", [("now", "{}")], ", search(q=open('x'))] end"
    ),
    "generic": Output(
        "json",
        '[{"name": "search", "arguments": {"q": "x"}}, {"name": "now"}]',
        [("search", '{"q": "x"}'), ("now", "{}")],
    ),
}

"""Structured output over HTTP, with octavo's own engine on a tiny random model."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import psutil
import pytest

from tests.server.hostile_structures import EITHER, REFUSED, definitions
from tests.server.running import RunningServer
from tests.tiny_models import make_folder

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
ANSWER_S = 8.0
"""Compiling may take 3 s, and a process to do so 1 s to start."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_folder(tmp_path_factory.mktemp("structured"))
    options = ["--dtype", "float32", "--num-threads", "1", "--kv-cache-memory-bytes", "8M"]
    with RunningServer(
        "octavo", "serve", str(folder), "--port", "0", "--served-model-name", "tiny", *options
    ) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(http: httpx.Client, path: str = TEXT, **fields: Any) -> httpx.Response:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return http.post(path, json={"max_tokens": 200, "temperature": 1.5, "seed": 3, **prompt, **fields})


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, **fields}}}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields",
    [
        json_schema(strict=True),
        json_schema(strict=False),
        json_schema(description="d"),
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
)
def test_a_schema_is_kept_to_however_it_is_sent(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text_of(ask(http, path, **fields))), SCHEMA)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_json_mode_gives_an_object(http: httpx.Client, path: str) -> None:
    answers = [ask(http, path, response_format={"type": "json_object"}, seed=seed) for seed in range(8)]
    ended = [answer for answer in answers if answer.json()["choices"][0]["finish_reason"] == "stop"]
    assert ended
    assert all(isinstance(json.loads(text_of(answer)), dict) for answer in ended)


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": "[a-c]{3}-[x-z]"}, "[a-c]{3}-[x-z]"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,3}/'}, "<[a-z]{1,3}>"),
    ],
)
def test_other_structures_are_kept_to_and_their_older_names_are_warned_of(
    http: httpx.Client, structure: dict[str, Any], pattern: str
) -> None:
    (kind, value), *_ = structure.items()
    newer = ask(http, structured_outputs=structure)
    older = ask(http, **{f"guided_{kind}": value})
    assert re.fullmatch(pattern, text_of(newer))
    assert text_of(older) == text_of(newer)
    assert f"guided_{kind}" in older.headers["x-octavo-warning"]
    assert "x-octavo-warning" not in newer.headers


def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "seed": 5,
        "max_tokens": 200,
        **json_schema(strict=True),
    }
    whole = client.chat.completions.create(**request).choices[0]
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [whole.finish_reason]


def test_an_answer_that_the_limit_cuts_says_length(http: httpx.Client) -> None:
    response = ask(http, CHAT, **json_schema(), max_tokens=3)
    assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        (json_schema(schema={"type": "wibble"}), "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
    ],
)
def test_what_can_not_be_asked_for_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = ask(http, CHAT, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("name", [*REFUSED, *EITHER])
def test_a_hostile_structure_harms_nobody(http: httpx.Client, server: RunningServer, name: str) -> None:
    hostile = REFUSED.get(name) or EITHER[name]
    engine, start = engine_of(server), time.perf_counter()
    response = ask(http, structured_outputs=hostile, max_tokens=400)
    assert time.perf_counter() - start < ANSWER_S
    assert response.status_code in ((400,) if name in REFUSED else (200, 400)), response.text[:500]
    if response.status_code == 400:
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert text_of(ask(http, structured_outputs={"choice": ["next"]})) == "next"
    assert engine_of(server) == engine


def test_a_checker_that_died_is_started_anew(http: httpx.Client, server: RunningServer) -> None:
    assert text_of(ask(http, structured_outputs={"choice": ["before"]})) == "before"
    children = psutil.Process(server.process.pid).children()
    checkers = [child for child in children if "octavo.server.grammar_check" in child.cmdline()]
    for checker in checkers:
        checker.kill()
    psutil.wait_procs(checkers)
    assert checkers
    assert text_of(ask(http, structured_outputs={"choice": ["after"]})) == "after"


def test_slow_grammars_delay_none_but_each_other(http: httpx.Client) -> None:
    """Copies are tried once; of others, few wait, and what compiles at once does not wait for them."""
    slow = [{"json": definitions(30 + n, "allOf", {"type": "boolean"})} for n in range(20)]
    with ThreadPoolExecutor(40) as pool:
        copies = [pool.submit(ask, http, structured_outputs=slow[0]) for _ in range(20)]
        others = [pool.submit(ask, http, structured_outputs=one) for one in slow[1:]]
        time.sleep(0.3)
        for number in range(3):
            start = time.perf_counter()
            assert text_of(ask(http, structured_outputs={"choice": [f"quick {number}"]})) == f"quick {number}"
            assert time.perf_counter() - start < 10
        statuses = {answer.result().status_code for answer in copies}
        assert len(statuses) == 1
        assert {answer.result().status_code for answer in others} <= {200, 400, 429}
    start = time.perf_counter()
    ask(http, structured_outputs=slow[0], max_tokens=1)
    assert time.perf_counter() - start < 1  # remembered, whatever became of it


def test_a_grammar_that_fails_in_a_stream_ends_it_with_an_error(http: httpx.Client) -> None:
    # So many tokens come before it grows that the first is on its way by then, however busy the machine.
    structure = {"regex": "(b|c)(d|e)" * 12 + "((a{1000}){1000}){1000}"}
    response = ask(http, structured_outputs=structure, stream=True)
    assert response.status_code == 200, response.text
    *_, error, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert json.loads(error)["error"]["type"] == "invalid_request_error"
    assert done == "[DONE]"


def test_the_corpus_has_fifty() -> None:
    assert len(REFUSED) + len(EITHER) >= 50


def engine_of(server: RunningServer) -> psutil.Process:
    children = psutil.Process(server.process.pid).children()
    (engine,) = (child for child in children if "octavo.engine.process" in child.cmdline())
    return engine


ROW = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_other_dialects_are_enforced(http: httpx.Client, path: str) -> None:
    for fields in (
        {"response_format": {"type": "json_object", "schema": ROW}},
        {"response_format": {"type": "json_schema", "schema": ROW}},
        {"response_format": {"type": "json", "value": ROW}},
        {"json_schema": ROW},
        {"json_schema": json.dumps(ROW)},
        {"json_schema": {"name": "row", "schema": ROW}},
        {"format": ROW},
    ):
        assert json.loads(text_of(ask(http, path, **fields))).keys() == {"a"}, fields
    objects = [ask(http, path, **f, seed=1) for f in ({"format": "json"}, {"response_format": {"type": "json_object"}})]
    first, second = (response.json()["choices"][0] for response in objects)
    assert first == second
    grammar = 'root ::= "x" [0-9]'
    for fields in (
        {"regex": "x[0-9]"},
        {"grammar": grammar},
        {"ebnf": grammar},
        {"response_format": {"type": "regex", "value": "x[0-9]"}},
        {"response_format": {"type": "grammar", "grammar": grammar}},
    ):
        response = ask(http, path, **fields)
        assert re.fullmatch("x[0-9]", text_of(response)), fields
        assert "x-octavo-warning" not in response.headers
    nothing: dict[str, Any] = {"format": "", "grammar": "", "regex": None, "json_schema": {}, "ebnf": ""}
    assert ask(http, path, **nothing).status_code == 200
    for fields, param in (
        ({"format": "yaml"}, "format"),
        ({"regex": "a", "grammar": grammar}, "grammar"),
        ({"regex": "("}, "regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"response_format": {"type": "regex"}}, "response_format"),
    ):
        response = ask(http, path, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), fields


def test_keywords_that_demand_nothing_are_passed_over_and_others_named(http: httpx.Client) -> None:
    idle: list[dict[str, Any]] = [
        {"uniqueItems": False}, {"if": {}}, {"then": {}}, {"if": {}, "then": True, "else": {}}, {"minContains": 0},
        {"contains": {"type": "null"}, "minContains": 0}, {"propertyNames": {}}, {"dependentRequired": {}},
        {"dependentSchemas": {}}, {"dependencies": {}}, {"unevaluatedProperties": True}, {"not": False},
        {"propertyNames": {"type": "string"}}, {"required": None}, {"uniqueItems": True, "maxItems": 1},
    ]  # fmt: skip
    for keywords in idle:
        response = ask(http, structured_outputs={"json": {"required": ["a"], **ROW} | keywords})
        assert response.status_code == 200, keywords
        assert "x-octavo-warning" not in response.headers
    names = {"type": "object", "properties": {"uniqueItems": {"type": "integer"}}, "required": ["uniqueItems"]}
    assert "uniqueItems" in text_of(ask(http, structured_outputs={"json": names}))
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 2, "maxItems": 3}
    response = ask(http, structured_outputs={"json": unique})
    assert len(json.loads(text_of(response))) in (2, 3)
    assert "uniqueItems" in response.headers["x-octavo-warning"]
    for demanding in ({"contains": {}}, {"not": {"type": "null"}}, {"$defs": 5}, {"$defs": []}, {"definitions": "x"}):
        response = ask(http, structured_outputs={"json": ROW | demanding})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs"), demanding


def test_the_white_space_of_json_can_be_chosen(http: httpx.Client) -> None:
    for pattern, form in ((r"[\n\t ]{1,2}", r"\{\s{1,2}.*"), (r"\s?", r".*"), ("", r"\S*"), (r"(?: |\n)*", r".*")):
        text = text_of(ask(http, structured_outputs={"json": ROW, "whitespace_pattern": pattern}, max_tokens=200))
        assert re.fullmatch(form, text, re.DOTALL), (pattern, text)
    assert text_of(ask(http, structured_outputs={"json": ROW, "disable_any_whitespace": True})).startswith('{"a":')
    for wrong in ("[a-z]*", ".", "5", "[^a]", "\\S", "(", " " * 101):
        response = ask(http, structured_outputs={"json": ROW, "whitespace_pattern": wrong})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs"), wrong


def test_constraints_that_leave_nothing_are_the_request_s_fault(http: httpx.Client) -> None:
    for path, fields, param in (
        (TEXT, {"structured_outputs": {"regex": "[a-c]{3,9}"}, "allowed_token_ids": [0]}, "allowed_token_ids"),
        (CHAT, {"guided_regex": "[a-c]{3,9}", "allowed_token_ids": [0], "n": 3}, "allowed_token_ids"),
    ):
        response = ask(http, path, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert "left" in response.json()["error"]["message"]
    assert text_of(ask(http, structured_outputs={"choice": ["next"]})) == "next"


def test_structured_output_and_a_forced_call_exclude_each_other(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = {"type": "function", "function": {"name": "f"}}
    for choice in (named, "required"):
        response = ask(http, CHAT, tools=tools, tool_choice=choice, structured_outputs={"regex": "a"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")

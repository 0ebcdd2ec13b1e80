"""Forced calls: the grammar that the fields ask for, and SmolLM2, whose template knows no tools, bound by it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams
from octavo.server.requests.tool_use import choose
from octavo.server.requests.tools import NamedToolChoice, Tool
from tests.server.running import RunningServer
from tests.server.sse import chunks_of
from tests.server.test_tools import streamed, whole
from tests.smollm2 import gguf_path

PATH = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 2},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["places", "unit"],
    "additionalProperties": False,
    "$defs": {"place": CITY | {"additionalProperties": False}},
}
SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "maxLength": 30}, "limit": {"type": "integer", "minimum": 1}},
    "required": ["query"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "search": SEARCH}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()] + [
    {"type": "function", "function": {"name": "now"}}
]
ASK = {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}], "tools": TOOLS, "max_tokens": 160}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}


def schema_of(choice: Any, parallel: bool = True, tools: Any = TOOLS) -> Any:
    params = choose([Tool.model_validate(tool) for tool in tools], choice, parallel).constrain(SamplingParams())
    assert params.structured_outputs is not None
    assert params.structured_outputs.json is not None
    return json.loads(params.structured_outputs.json)


def test_required_calls_refer_to_their_own_definitions() -> None:
    validator = jsonschema.Draft202012Validator(schema_of("required"))
    weather = {"name": "get_weather", "parameters": {"places": [{"city": "Oslo"}], "unit": "celsius"}}
    assert validator.is_valid([weather, {"name": "search", "parameters": {"query": "x"}}])
    assert validator.is_valid([{"name": "now", "parameters": {}}])
    for wrong in (
        [],
        [{"name": "search", "parameters": weather["parameters"]}],
        [{"name": "get_weather", "parameters": {"places": ["Oslo"], "unit": "celsius"}}],
        [{"name": "now", "parameters": {"zone": 1}}],
    ):
        assert not validator.is_valid(wrong)


def test_names_and_data_that_look_like_references_stay() -> None:
    properties = {"$ref": {"const": {"$ref": "#/x"}}, "enum": {"$ref": "#"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    place = "#/items/anyOf/0/properties/parameters"
    moved = schema_of("required", tools=[tool])["items"]["anyOf"][0]["properties"]["parameters"]["properties"]
    assert moved == {"$ref": {"const": {"$ref": "#/x"}}, "enum": {"$ref": place}}


def test_without_parallel_calls_there_is_room_for_one() -> None:
    assert schema_of("required", parallel=False)["maxItems"] == 1


def test_a_named_call_has_the_function_s_schema() -> None:
    choice = NamedToolChoice.model_validate(NAMED["tool_choice"])
    assert schema_of(choice) == WEATHER


def test_schemas_that_are_too_deep_name_the_tools() -> None:
    schema: dict[str, Any] = {}
    for _ in range(2000):
        schema = {"items": schema}
    tool = Tool.model_construct(
        function=Tool.model_validate(TOOLS[0]).function.model_copy(update={"parameters": schema})
    )
    with pytest.raises(InvalidRequestError) as refused:
        choose([tool], "required", True).constrain(SamplingParams())
    assert refused.value.param == "tools"


def arguments_of(parameters: Any) -> Any:
    """The schema that a forced call of a function with these parameters is bound to."""
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    choice = NamedToolChoice.model_validate({"function": {"name": "f"}})
    structure = choose([tool], choice, True).constrain(SamplingParams()).structured_outputs
    assert structure is not None
    return json.loads(str(structure.json))


def test_unusual_names_of_types_are_understood() -> None:
    for kind in ("OBJECT", "dict", ["object", "null"], "Object"):
        assert arguments_of({"type": kind}) == {"type": "object"}
    inner = {"a": {"type": "STRING"}, "b": {"type": ["int", "NULL"]}, "type": {"type": "any"}, "c": {"enum": ["dict"]}}
    assert arguments_of({"type": "dict", "properties": inner})["properties"] == {
        "a": {"type": "string"}, "b": {"type": ["integer", "null"]}, "type": {}, "c": {"enum": ["dict"]}
    }  # fmt: skip
    for wrong in ("array", ["string", "null"], 5):
        with pytest.raises(InvalidRequestError, match="object"):
            arguments_of({"type": wrong})


@pytest.fixture(scope="module")
def smollm2() -> Iterator[httpx.Client]:
    options = ["--model", gguf_path(), "--port", "0", "--max-model-len", "512", "--max-num-seqs", "4"]
    with (
        RunningServer("octavo.entrypoints.openai.api_server", *options) as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=120) as http,
    ):
        yield http


def both(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = ASK | {"temperature": 0} | fields
    answer = whole(http.post(PATH, json=body).json())
    assert streamed(chunks_of(http, PATH, **body)) == answer
    assert answer["content"] == ""
    return answer


def test_a_named_call_of_smollm2_follows_the_schema(smollm2: httpx.Client) -> None:
    answer = both(smollm2, **NAMED)
    ((name, arguments),) = answer["tool_calls"]
    assert name == "get_weather"
    jsonschema.validate(json.loads(arguments), WEATHER)
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_of_smollm2_follow_the_schemas(smollm2: httpx.Client, parallel: bool) -> None:
    answer = both(smollm2, tool_choice="required", parallel_tool_calls=parallel, temperature=0.8, seed=3)
    calls = answer["tool_calls"]
    complete = calls if answer["finish_reason"] == "tool_calls" else calls[:-1]
    assert complete
    assert parallel or len(calls) == 1
    for name, arguments in complete:
        jsonschema.validate(json.loads(arguments), SCHEMAS.get(name, {"maxProperties": 0}))


def test_a_forced_call_that_is_cut_says_length(smollm2: httpx.Client) -> None:
    answer = both(smollm2, **NAMED, max_tokens=5)
    assert answer["finish_reason"] == "length"
    ((name, arguments),) = answer["tool_calls"]
    assert name == "get_weather"
    assert arguments.startswith("{")


def test_a_schema_that_can_not_be_compiled_is_refused(smollm2: httpx.Client) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "strin"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    response = smollm2.post(PATH, json=ASK | {"tools": tools, "tool_choice": "required"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "strin" in response.json()["error"]["message"]

"""/openapi.json is complete and true: what it says is sent is sent, and nothing else."""

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from octavo.api.metrics import EngineMetrics
from octavo.server.app import create_app
from octavo.server.http.openapi import ANSWERS
from octavo.server.service import Service
from tests.server.running import RunningServer

TEXT = "/v1/completions"
SCHEMA = schemathesis.openapi.from_dict(create_app(Service("m", EngineMetrics("m"))).openapi())


@pytest.fixture(scope="session")
def document(http: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = http.get("/openapi.json").json()
    return answer


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for inner in node.values():
            yield from references(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from references(inner)


def test_every_route_and_its_answer_are_described(document: dict[str, Any]) -> None:
    assert document["paths"].keys() == ANSWERS.keys()
    for operations in document["paths"].values():
        for method, operation in operations.items():
            assert ("requestBody" in operation) == (method == "post")
            assert "422" not in operation["responses"]
            assert {"200", "401", "500", "503"} <= operation["responses"].keys()
            assert all(response["content"] for response in operation["responses"].values())


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    names = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert names == names & document["components"]["schemas"].keys()
    assert {"ChatCompletion", "TextCompletion", "ErrorBody"} <= names


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "<say>ab", "logprobs": 2, "echo": False, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<say>ab"}], "logprobs": True}),
        ("/tokenize", {"prompt": "ab", "return_token_strs": True}),
        ("/detokenize", {"tokens": [20, 21]}),
        ("/v1/models", None),
        ("/v1/models/{name}", None),
        ("/health", None),
        ("/version", None),
        (TEXT, {"prompt": 5}),
    ],
)
def test_an_answer_is_as_described(http: httpx.Client, document: dict[str, Any], path: str, body: Any) -> None:
    url = path.replace("{name}", "scripted")
    response = http.get(url) if body is None else http.post(url, json=body)
    operation = document["paths"][path]["get" if body is None else "post"]
    schema = operation["responses"][str(response.status_code)]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
    validator.validate(response.json())


OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]
MADE_UP = [  # there is nothing to get wrong where nothing is sent
    pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
    for operation in OPERATIONS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or operation.method == "post"
]


@pytest.mark.parametrize(("operation", "mode"), MADE_UP)
def test_made_up_requests_are_answered_as_described(
    server: RunningServer, operation: Any, mode: GenerationMode
) -> None:
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        case.call_and_validate(base_url=server.url, timeout=20, excluded_checks=[positive_data_acceptance])

    check()

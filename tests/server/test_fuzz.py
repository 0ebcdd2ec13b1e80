"""Any JSON in any field: an answer or a refusal, never a server error, and the next request is served."""

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.server.requests.fields import HARMLESS, UNSUPPORTED
from octavo.server.routes.chat import ChatCompletionRequest
from octavo.server.routes.completions import CompletionRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
FIELDS = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED, *HARMLESS})
BY_BYTES = {"Content-Type": "application/json"}

numbers = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, 1e-300])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
likely = st.integers(-2, 40) | st.floats(-2, 2) | st.text(max_size=3) | st.lists(st.integers(0, 320), max_size=3)
bodies = st.dictionaries(st.sampled_from(FIELDS), values | likely, max_size=4)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([CHAT, TEXT]), body=bodies)
def test_any_fields_are_answered_or_refused(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    base = {"messages": [{"role": "user", "content": "<say>ab"}]} if path == CHAT else {"prompt": "<say>ab"}
    request = {"max_tokens": 4} | base | body
    response = http.post(path, content=json.dumps(request), headers=BY_BYTES)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
        return
    alive = http.post(TEXT, json={"prompt": "<say>x"})
    assert alive.json()["choices"][0]["text"] == "x"

"""/v1/embeddings over octavo's own engine, a tiny BERT; and what a model that generates says to it."""

import asyncio
import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM
from tests.server.running import RunningServer
from tests.tiny_encoders import TEXTS, make_encoder_folder

MODULE = "octavo.entrypoints.openai.api_server"
URL = "/v1/embeddings"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_encoder_folder(tmp_path_factory.mktemp("bert"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [16, 64]}))
    return folder


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[RunningServer]:
    options = ["--num-threads", "1", "--max-num-seqs", "8", "--port", "0", "--served-model-name", "tiny"]
    with RunningServer(MODULE, "--model", str(folder), *options) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def embedder(tiny: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def web(tiny: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.url, timeout=30) as client:
        yield client


def post(web: httpx.Client, **body: Any) -> httpx.Response:
    return web.post(URL, content=json.dumps(body), headers={"Content-Type": "application/json"})


def vectors(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


def metric(web: httpx.Client, name: str) -> float:
    lines = web.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def test_floats_and_base64_agree_with_each_other_and_with_the_offline_engine(
    embedder: openai.OpenAI, folder: Path
) -> None:
    as_floats = embedder.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    by_default = embedder.embeddings.create(model="tiny", input=TEXTS)  # which the client asks for in base64
    floats = [entry.embedding for entry in as_floats.data]
    assert [entry.embedding for entry in by_default.data] == floats
    assert [entry.index for entry in as_floats.data] == list(range(len(TEXTS)))
    offline = LLM(str(folder), use_tqdm=False).embed(TEXTS, use_tqdm=False)
    assert [output.embedding for output in offline] == floats
    num_tokens = sum(len(output.prompt_token_ids) for output in offline)
    assert (as_floats.usage.prompt_tokens, as_floats.usage.total_tokens) == (num_tokens, num_tokens)


def test_base64_is_little_endian_float32(web: httpx.Client) -> None:
    (floats,) = vectors(post(web, input="the fox"))
    (text,) = vectors(post(web, input="the fox", encoding_format="base64"))
    assert list(struct.unpack("<64f", base64.b64decode(text))) == floats


def test_a_text_may_be_a_string_or_token_ids_alone_or_in_a_list(web: httpx.Client) -> None:
    ids = web.post("/tokenize", json={"prompt": "the fox"}).json()["tokens"]
    (alone,) = vectors(post(web, input="the fox"))
    assert vectors(post(web, input=ids)) == [alone]
    assert vectors(post(web, input=["the fox", "the dog"]))[0] == alone
    assert vectors(post(web, input=[[7, 8], ids]))[1] == alone


def test_a_text_is_cut_off_only_when_asked(web: httpx.Client) -> None:
    refused = post(web, input="the fox " * 100)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert "128 tokens" in error["message"]
    cut = post(web, input="the fox " * 100, truncate_prompt_tokens=-1)
    assert cut.json()["usage"]["prompt_tokens"] == 128
    assert post(web, input="the quick brown fox", truncate_prompt_tokens=4).json()["usage"]["prompt_tokens"] == 4


def test_dimensions_cut_a_matryoshka_model_s_embeddings(web: httpx.Client) -> None:
    (whole,) = vectors(post(web, input="the fox", dimensions=64))
    (cut,) = vectors(post(web, input="the fox", dimensions=16))
    start = np.array(whole[:16])
    assert np.allclose(cut, start / np.linalg.norm(start), atol=1e-6)
    assert "one of 16, 64, got 20" in post(web, input="the fox", dimensions=20).json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"), ({"input": []}, "input"), ({"input": [[]]}, "input"), ({"input": None}, "input"),
        ({"input": 5}, "input"), ({"input": [1, "a"]}, "input"), ({"input": ["a", None]}, "input"),
        ({"input": [-1]}, "input"), ({"input": [200]}, "input"), ({"input": [10**30]}, "input"),
        ({"input": [5.5]}, "input"), ({"input": {"text": "a"}}, "input"), ({"input": ["a"] * 2049}, "input"),
        ({"input": "\ud800"}, "input"), ({"input": [[5] * 129]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"), ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 2**40}, "dimensions"), ({"input": "a", "dimensions": "16"}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
    ],
)  # fmt: skip
def test_what_can_not_be_embedded_is_the_request_s_fault(
    body: dict[str, Any], param: str | None, web: httpx.Client
) -> None:
    response = post(web, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert len(vectors(post(web, input="the next one is served"))) == 1


FORMATS: dict[str, tuple[Any, float]] = {
    "float32": (torch.float32, 0),
    "float16": (torch.float16, 1e-3),
    "bfloat16": (torch.bfloat16, 1e-2),
    "fp8_e4m3": (torch.float8_e4m3fn, 0.05),
    "fp8_e5m2": (torch.float8_e5m2, 0.1),
}


@pytest.mark.parametrize("dtype", FORMATS)
def test_vectors_come_in_every_number_format_and_byte_order(web: httpx.Client, dtype: str) -> None:
    (floats,) = vectors(post(web, input="the fox"))
    kind, _ = FORMATS[dtype]
    rounded = torch.tensor(floats).to(kind)
    for order in ("native", "little", "big"):
        form = {"embed_dtype": dtype, "endianness": order}
        (text,) = vectors(post(web, input="the fox", encoding_format="base64", **form))
        content = base64.b64decode(text)
        size = len(content) // len(floats)
        numbers = np.frombuffer(content, f"{'>' if order == 'big' else '<'}u{size}").astype(f"u{size}")
        assert np.array_equal(numbers, np.frombuffer(rounded.view(torch.uint8).numpy().tobytes(), f"u{size}"))
        response = post(web, input=["the dog", "the fox"], encoding_format="bytes", **form)
        assert response.headers["content-type"] == "application/octet-stream"
        metadata = json.loads(response.headers["metadata"])
        place = metadata["data"][1]
        assert response.content[place["start"] : place["end"]] == content
        assert (place["index"], place["shape"]) == (1, [64])
        assert (place["embed_dtype"], place["endianness"]) == (dtype, order)
        assert metadata["usage"]["prompt_tokens"] > 0
        only = post(web, input=["the dog", "the fox"], encoding_format="bytes_only", **form)
        assert only.content == response.content
        assert "metadata" not in only.headers


def test_pooling_and_invocations_embed_too(web: httpx.Client) -> None:
    (floats,) = vectors(post(web, input="the fox"))
    pooled = web.post("/pooling", json={"input": "the fox", "task": "embed"}).json()
    assert [entry["data"] for entry in pooled["data"]] == [floats]
    assert pooled["data"][0]["object"] == "pooling"
    assert vectors(web.post("/invocations", json={"input": "the fox"})) == [floats]
    assert web.post("/invocations", json={"input": "the fox", "task": "embed"}).json()["data"] == pooled["data"]
    for task in ("classify", "token_embed", "plugin"):
        response = web.post("/pooling", json={"input": "the fox", "task": task})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "task")
    assert web.post("/invocations", json={"prompt": "x"}).json()["error"]["param"] == "model"


def test_the_length_of_vectors_and_the_side_that_is_cut(web: httpx.Client) -> None:
    (floats,) = vectors(post(web, input="the fox"))
    assert vectors(post(web, input="the fox", use_activation=True)) == [floats]
    (own,) = vectors(post(web, input="the fox", use_activation=False))
    assert abs(np.linalg.norm(own) - 1) > 0.01
    assert np.allclose(np.array(own) / np.linalg.norm(own), floats, atol=1e-6)
    (own_cut,) = vectors(post(web, input="the fox", use_activation=False, dimensions=16))
    assert own_cut == own[:16]
    ids = web.post("/tokenize", json={"prompt": "the quick brown fox"}).json()["tokens"]
    for side, kept in (("left", ids[-3:]), ("right", ids[:3]), (None, ids[:3])):
        cut = post(web, input=ids, truncate_prompt_tokens=3, truncation_side=side)
        assert vectors(cut) == vectors(post(web, input=kept))
    for field in ("embed_dtype", "endianness", "truncation_side"):
        assert post(web, input="a", **{field: "bad"}).json()["error"]["param"] == field
    assert post(web, input="a", messages=[]).json()["error"]["param"] == "input"
    assert post(web, messages=[{"role": "user", "content": "x"}]).json()["error"]["param"] == "messages"
    assert post(web, input="a", cache_salt="").json()["error"]["param"] == "cache_salt"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["input", "encoding_format", "dimensions", "truncate_prompt_tokens", "add_special_tokens", "user", "priority"]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.fixed_dictionaries({"input": JUNK}, optional=dict.fromkeys(FIELDS[1:], JUNK)))
def test_no_request_is_the_server_s_fault(body: dict[str, Any], web: httpx.Client) -> None:
    assert post(web, **body).status_code in (200, 400)


def test_another_model_is_not_found_and_unknown_fields_are_named(web: httpx.Client) -> None:
    assert post(web, input="a", model="other").status_code == 404
    assert "surprise" in post(web, input="a", surprise=1).headers["x-octavo-warning"]


def test_a_model_that_embeds_does_not_generate(web: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "hello"})):
        response = web.post(path, json=body)
        assert response.status_code == 400
        assert URL in response.json()["error"]["message"]


def test_a_model_that_generates_does_not_embed(http: httpx.Client) -> None:
    response = post(http, input="hello")
    assert response.status_code == 400
    assert "--runner pooling" in response.json()["error"]["message"]


async def test_texts_are_counted_and_concurrent_requests_get_what_one_alone_gets(
    tiny: RunningServer, web: httpx.Client
) -> None:
    texts = [TEXTS[i % len(TEXTS)] + " and" * i for i in range(20)]
    alone = [vectors(post(web, input=text))[0] for text in texts]
    before = metric(web, "request_success_total"), metric(web, "e2e_request_latency_seconds_count")
    async with httpx.AsyncClient(base_url=tiny.url, timeout=30) as client:
        answers = await asyncio.gather(*(client.post(URL, json={"input": text}) for text in texts))
    assert [vectors(answer)[0] for answer in answers] == alone
    after = metric(web, "request_success_total"), metric(web, "e2e_request_latency_seconds_count")
    assert (after[0] - before[0], after[1] - before[1]) == (20, 20)
    assert metric(web, "num_requests_running") + metric(web, "num_requests_waiting") == 0
    assert metric(web, "generation_tokens_total") == 0


async def test_a_client_that_goes_away_aborts_its_texts(tiny: RunningServer, web: httpx.Client) -> None:
    received, succeeded = metric(web, "num_requests_total"), metric(web, "num_requests_succeeded")
    async with httpx.AsyncClient(base_url=tiny.url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(URL, json={"input": [TEXTS[2]] * 2000}, timeout=httpx.Timeout(30, read=0.15))
    while metric(web, "request_success_total") < received + 2000:  # finished for any reason, aborts included
        await asyncio.sleep(0.02)
    assert metric(web, "num_requests_total") == received + 2000
    assert metric(web, "num_requests_succeeded") < succeeded + 2000
    assert len(vectors(post(web, input="the next one is served"))) == 1

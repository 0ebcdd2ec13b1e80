"""The server over octavo's own engine, started by the module path that vLLM's users type."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from octavo import LLM, BeamSearchParams
from tests.server.running import RunningServer
from tests.smollm2 import gguf_path
from tests.tiny_models import make_folder

MODULE = "octavo.entrypoints.openai.api_server"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[RunningServer]:
    options = ["--dtype", "float32", "--num-threads", "1", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "4M"]
    with RunningServer(
        MODULE, "--model", str(folder), "--port", "0", "--served-model-name", "tiny", *options
    ) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def client(tiny: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def loads_torch(process: psutil.Process) -> bool:
    return any("libtorch" in entry.path for entry in process.memory_maps())


def test_only_the_engine_process_loads_torch(tiny: RunningServer) -> None:
    assert loads_torch(tiny.engine)
    assert not loads_torch(psutil.Process(tiny.process.pid))


def test_the_streamed_answer_is_the_whole_answer(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the quick brown fox"}],
        "max_tokens": 60,
        "seed": 5,
    }
    whole = client.chat.completions.create(**request)
    chunks = client.chat.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


async def test_concurrent_greedy_answers_are_those_of_one_alone(tiny: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none") as client:

        async def complete(prompt: list[int]) -> tuple[Any, Any]:
            answer = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=20, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
            )
            return answer.choices[0].text, answer.choices[0].logprobs

        prompts = [[3 + i, *range(40, 60 + 3 * i)] for i in range(12)]
        alone = [await complete(prompt) for prompt in prompts]
        assert await asyncio.gather(*map(complete, prompts)) == alone


async def test_scores_of_prompts_are_the_same_alone_together_and_after_an_answer(tiny: RunningServer) -> None:
    """As lm-eval asks for them."""
    async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none") as client:

        async def score(prompt: list[int], max_tokens: int) -> Any:
            answer = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=1, echo=True
            )
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.token_logprobs is not None
            assert logprobs.top_logprobs is not None
            assert len(logprobs.token_logprobs) == len(prompt) + max_tokens
            assert logprobs.token_logprobs[0] is None
            return logprobs.token_logprobs[1 : len(prompt)], logprobs.top_logprobs[1 : len(prompt)]

        prompts = [[3 + i, *range(40, 60 + 30 * i)] for i in range(8)]
        alone = [await score(prompt, 1) for prompt in prompts]
        await asyncio.gather(*(client.completions.create(model="tiny", prompt=p, max_tokens=4) for p in prompts))
        assert await asyncio.gather(*(score(prompt, i % 2) for i, prompt in enumerate(prompts))) == alone
        for token_logprobs, top_logprobs in alone:
            assert all(logprob <= max(top.values()) for logprob, top in zip(token_logprobs, top_logprobs, strict=True))


def test_a_context_that_is_too_long_names_the_model_s_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model="tiny", prompt=[5] * 500, max_tokens=50)


def test_metrics_show_what_share_of_the_memory_roof_is_reached(tiny: RunningServer, client: openai.OpenAI) -> None:
    roof = tiny.wait_for(r"roof of one stream: (\S+) GB/s over \d+ MB a token = (\d+) tokens/s")
    assert min(map(float, roof.groups())) > 0
    client.completions.create(model="tiny", prompt=[60, 61], max_tokens=40, extra_body={"ignore_eos": True})
    metrics = httpx.get(f"{tiny.url}/metrics").text
    (line,) = [line for line in metrics.splitlines() if line.startswith("octavo:memory_roof_share{")]
    assert 0 < float(line.split()[-1]) < 1.2


@pytest.mark.slow
async def test_sixty_four_streams_of_smollm2_complete() -> None:
    options = ["--served-model-name", "smollm2", "--port", "0", "--access-log=off"]
    with RunningServer(MODULE, "--model", gguf_path(), *options) as server:
        url = server.wait_ready().url
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0) as client:

            async def stream(i: int) -> tuple[int, int]:
                chunks = await client.completions.create(
                    model="smollm2",
                    prompt=[100 + i] * 128,
                    max_tokens=128,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
                usage = [chunk.usage async for chunk in chunks][-1]
                assert usage is not None
                return usage.prompt_tokens, usage.completion_tokens

            assert await asyncio.gather(*map(stream, range(64))) == [(128, 128)] * 64


def test_beams_over_http_are_those_of_the_offline_search(folder: Path, client: openai.OpenAI) -> None:
    prompt = [60, 61, 62, 63]
    params = BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=0.5)
    llm = LLM(str(folder), dtype="float32", max_num_seqs=8, use_tqdm=False)
    (offline,) = llm.beam_search(prompt, params, use_tqdm=False)
    request: dict[str, Any] = {"model": "tiny", "prompt": prompt, "n": 3, "max_tokens": 12, "logprobs": 2}
    beams = {"use_beam_search": True, "length_penalty": 0.5, "return_token_ids": True}
    whole = client.completions.create(**request, extra_body=beams)
    assert [prompt + choice.token_ids for choice in whole.choices] == [beam.tokens for beam in offline.sequences]  # type: ignore[attr-defined]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.token_logprobs == [entry.logprob for entry in offline.sequences[0].logprobs]
    chunks = client.completions.create(**request, extra_body=beams, stream=True)
    streamed = {chunk.choices[0].index: chunk.choices[0].text for chunk in chunks}
    assert streamed == {choice.index: choice.text for choice in whole.choices}


def test_beams_of_a_chat_are_distinct_and_without_logprobs_unless_asked(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "the quick brown fox"}],
        n=4,
        max_tokens=10,
        extra_body={"use_beam_search": True, "return_token_ids": True},
    )
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 4  # type: ignore[attr-defined]
    assert [choice.logprobs for choice in answer.choices] == [None] * 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 40


def test_log_probabilities_of_chosen_tokens_are_those_of_all(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": [60, 61], "max_tokens": 4, "seed": 3}
    names = {"return_tokens_as_token_ids": True}
    wide = client.completions.create(**request, logprobs=20, extra_body=names).choices[0].logprobs
    assert wide is not None
    assert wide.top_logprobs is not None
    for i, top in enumerate(wide.top_logprobs):
        some = [int(name.removeprefix("token_id:")) for name in top][3:6]
        narrow = client.completions.create(**request, logprobs=0, extra_body=names | {"logprob_token_ids": some})
        found = narrow.choices[0].logprobs
        assert found is not None
        assert found.top_logprobs is not None
        assert found.top_logprobs[i] == {f"token_id:{t}": top[f"token_id:{t}"] for t in some} | {
            found.tokens[i]: found.token_logprobs[i]  # type: ignore[index]
        }
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=2, logprobs=True,
        extra_body={"logprob_token_ids": [100, 7]} | names,
    )  # fmt: skip
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert all([entry.token for entry in token.top_logprobs] == ["token_id:100", "token_id:7"] for token in content)


def test_a_seed_of_minus_one_is_random_and_others_are_not(client: openai.OpenAI) -> None:
    def texts(seed: Any) -> set[str]:
        request: dict[str, Any] = {"model": "tiny", "prompt": [60, 61], "max_tokens": 12, "extra_body": {"seed": seed}}
        return {client.completions.create(**request).choices[0].text for _ in range(4)}

    assert len(texts(-1)) > 1
    assert len(texts(-1.0)) > 1
    assert len(texts(None)) > 1
    assert len(texts(-2)) == len(texts(5)) == len(texts(5.0)) == 1
    assert texts(5) == texts(5.0)

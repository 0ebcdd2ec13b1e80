"""The server over octavo's own engine, started by the module path that vLLM's users type."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from tests.server.running import RunningServer
from tests.smollm2 import gguf_path
from tests.tiny_models import make_folder

MODULE = "octavo.entrypoints.openai.api_server"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_folder(tmp_path_factory.mktemp("tiny"))
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


@pytest.mark.slow
async def test_sixty_four_streams_of_smollm2_complete() -> None:
    options = ["--served-model-name", "smollm2", "--port", "0", "--disable-access-log"]
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

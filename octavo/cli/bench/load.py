"""Load on an OpenAI server: sends the requests when they are due and notes when each piece of the answers arrives."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from octavo.cli.bench.dataset import BenchRequest, as_text
from octavo.cli.http_client import HttpClient, ServerError
from octavo.cli.openai_stream import Event, decode_event, first_model

__all__ = ["Answer", "Load", "LoadClient", "run_load"]

READY_INTERVAL_S = 0.5


@dataclass(slots=True)
class Answer:
    """What a client saw of one request. Times in seconds."""

    input_len: int
    start_s: float
    """When it was sent, by time.perf_counter."""
    ttft_s: float | None = None
    latency_s: float = 0.0
    """From sending it to the last piece of the answer."""
    gaps_s: list[float] = field(default_factory=list)
    output_len: int = 0
    pieces: list[str] = field(default_factory=list)
    error: str | None = None

    def record(self, event: Event, now_s: float) -> None:
        if event.usage is not None:
            self.input_len, self.output_len = event.usage.prompt_tokens, event.usage.completion_tokens
        # Tokens that have no text send nothing: of those alone, the usage at the end is the first that is seen.
        if not event.has_tokens and not (self.ttft_s is None and self.output_len):
            return
        elapsed_s = now_s - self.start_s
        if self.ttft_s is None:
            self.ttft_s = elapsed_s
        else:
            self.gaps_s.append(elapsed_s - self.latency_s)
        self.latency_s = elapsed_s
        self.pieces.append(event.text)

    def close(self) -> None:
        """A server that sends no usage is taken to send one token an event."""
        if self.ttft_s is None:
            raise ServerError("The answer held no token.")
        self.output_len = self.output_len or len(self.pieces)


class LoadClient:
    """Sends requests to one endpoint of a server. `model` None: the first that the server lists."""

    def __init__(
        self, http: HttpClient, endpoint: str, model: str | None, fields: dict[str, Any], *, is_chat: bool
    ) -> None:
        self.http = http
        self.endpoint = endpoint
        self.model = model
        self.fields = {"stream": True, "stream_options": {"include_usage": True}} | fields
        self.is_chat = is_chat

    async def find_model(self) -> None:
        """Raises ServerError."""
        if self.model is None:
            self.model = first_model(await self.http.get("/v1/models"))

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Until the server answers a small request. Raises ServerError with its last error when the time is over."""
        deadline = time.perf_counter() + timeout_s
        while True:
            try:
                await self.find_model()
                error = (await self.send(BenchRequest([1] * 8, 1))).error
            except ServerError as refused:
                error = str(refused)
            if error is None:
                return
            if time.perf_counter() >= deadline:
                raise ServerError(error)
            await asyncio.sleep(READY_INTERVAL_S)

    async def send(self, request: BenchRequest) -> Answer:
        """The answer, or its error."""
        body = {"model": self.model, "max_tokens": request.output_len} | self._prompt(request) | self.fields
        answer = Answer(len(request.prompt_token_ids), time.perf_counter())
        try:
            async with aclosing(self.http.events(self.endpoint, body)) as events:
                async for data in events:
                    answer.record(decode_event(data), time.perf_counter())
            answer.close()
        except ServerError as error:
            answer.error = str(error)
        return answer

    def _prompt(self, request: BenchRequest) -> dict[str, Any]:
        if self.is_chat:
            return {"messages": [{"role": "user", "content": as_text(request)}]}
        return {"prompt": request.prompt_token_ids}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests, and when they are due."""

    requests: Sequence[BenchRequest]
    request_rate: float
    """A second; infinite: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the intervals; 1: exponential."""
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0

    async def arrivals(self) -> AsyncIterator[BenchRequest]:
        """Yield each request when it is due."""
        generator = random.Random(self.seed)
        due_s = time.perf_counter()
        for request in self.requests:
            yield request
            due_s += generator.gammavariate(self.burstiness, 1.0) / (self.request_rate * self.burstiness)
            if due_s > time.perf_counter():
                await asyncio.sleep(due_s - time.perf_counter())


def run_load(client: LoadClient, load: Load, ready_timeout_s: float, show_progress: bool) -> tuple[list[Answer], float]:
    """The answers in the requests' order, and the seconds they took in all. Raises ServerError without a server."""
    return asyncio.run(_run_load(client, load, ready_timeout_s, show_progress))


async def _run_load(
    client: LoadClient, load: Load, ready_timeout_s: float, show_progress: bool
) -> tuple[list[Answer], float]:
    await client.wait_until_ready(ready_timeout_s)
    await asyncio.gather(*(client.send(BenchRequest([index] * 8, 8)) for index in range(load.num_warmups)))
    limit: Any = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not show_progress, refresh_per_second=2) as progress:
        task = progress.add_task("Requests", total=len(load.requests))

        async def send(request: BenchRequest) -> Answer:
            async with limit:
                answer = await client.send(request)
            progress.advance(task)
            return answer

        start_s = time.perf_counter()
        sent = [asyncio.create_task(send(request)) async for request in load.arrivals()]
        answers = await asyncio.gather(*sent)
        return answers, time.perf_counter() - start_s

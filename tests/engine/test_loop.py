"""The engine's process: its loop over fakes, its socket, and a real one behind a client."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from msgspec import structs

from octavo.api.admission import Admission
from octavo.api.engine_client import EngineClient
from octavo.api.engine_process import EngineProcess
from octavo.api.metrics import IDLE, EngineMetrics
from octavo.core.scheduler_stats import SchedulerStats
from octavo.core.step import Fault, RequestDelta
from octavo.engine.loop import STATS_S, TAKE_S, EngineLoop
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.ipc.messages import AbortRequests, AddRequest, EngineFailed, FinishRequest, FromEngine, StepResult, ToEngine
from octavo.ipc.sockets import EngineSocket
from octavo.options import EngineConfig
from octavo.sampling_params import SamplingParams
from tests.server.running import make_tokenizer_folder
from tests.server.scripted_engine import END, SAY, SLOW
from tests.server.scripted_server import ENGINE_COMMAND


@dataclass
class FakeEngine:
    """Gives each request one token a step; the token counts the steps."""

    open: list[int] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    num_steps: int = 0
    params: list[SamplingParams | None] = field(default_factory=list)
    memory_roof_share: float | None = None

    def add_request(self, request: AddRequest) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequestError("The prompt is empty.")
        self.open.append(request.request_id)
        self.params.append(request.sampling_params)

    def abort(self, request_id: int) -> None:
        self.calls.append(("abort", request_id))
        self.open.remove(request_id)

    def finish(self, request_id: int, num_tokens: int) -> None:
        self.calls.append(("finish", num_tokens))
        self.open.remove(request_id)

    def step(self) -> list[RequestDelta]:
        self.num_steps += 1
        return [RequestDelta(request_id, [self.num_steps]) for request_id in self.open]

    def take_started(self) -> list[int]:
        return []

    def stats(self) -> SchedulerStats:
        return structs.replace(IDLE, num_running=len(self.open))

    def progress(self) -> int:
        return 0

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.open)


@dataclass
class FakeChannel:
    inbox: list[ToEngine] = field(default_factory=list)
    sent: list[FromEngine] = field(default_factory=list)
    num_waits: int = 0

    def wait(self) -> None:
        self.num_waits += 1

    def receive(self) -> Iterator[ToEngine]:
        while self.inbox:
            yield self.inbox.pop(0)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def add(request_id: int, *prompt: int) -> AddRequest:
    return AddRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling_params=SamplingParams())


def test_a_turn_takes_messages_steps_and_reports() -> None:
    channel = FakeChannel([add(1, 5), add(2, 5)])
    EngineLoop(FakeEngine(), channel).turn()
    assert channel.sent == [
        StepResult([RequestDelta(1, [1]), RequestDelta(2, [1])], structs.replace(IDLE, num_running=2)),
    ]


def test_an_idle_engine_waits_for_a_message() -> None:
    engine, channel = FakeEngine(), FakeChannel()
    loop = EngineLoop(engine, channel)
    loop.turn()
    channel.inbox = [add(1, 5)]
    loop.turn()
    loop.turn()
    assert channel.num_waits == 2
    assert engine.num_steps == 2


def test_what_is_sent_at_once_is_taken_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step comes after each part of a crowd's requests, and none is lost."""
    now = iter(range(1_000_000))
    monkeypatch.setattr("octavo.engine.loop.time.monotonic", lambda: next(now) * TAKE_S / 8)
    engine, channel = FakeEngine(), FakeChannel([add(request_id, 5) for request_id in range(40)])
    loop = EngineLoop(engine, channel)
    num_open = []
    while channel.inbox:
        loop.turn()
        num_open.append(len(engine.open))
    assert len(num_open) == engine.num_steps > 3
    assert engine.open == list(range(40))


def test_requests_that_were_sent_together_share_their_parameters() -> None:
    engine = FakeEngine()
    params = SamplingParams(logit_bias={5: 1.0})
    one, other = (AddRequest(request_id=i, prompt_token_ids=[5], sampling_params=params) for i in range(2))
    channel = FakeChannel([one, structs.replace(other, sampling_params=None), add(2, 5)])
    EngineLoop(engine, channel).turn()
    assert [taken is params for taken in engine.params] == [True, True, False]


def test_requests_end_between_steps() -> None:
    engine = FakeEngine()
    channel = FakeChannel([add(1, 5), add(2, 5), AbortRequests([1]), FinishRequest(2, 7)])
    EngineLoop(engine, channel).turn()
    assert engine.calls == [("abort", 1), ("finish", 7)]
    assert channel.sent == [StepResult([], IDLE)]


def test_a_request_that_the_engine_refuses_ends_with_its_message() -> None:
    channel = FakeChannel([add(1)])
    EngineLoop(FakeEngine(), channel).turn()
    assert channel.sent == [
        StepResult([RequestDelta(1, [], None, "error", error="The prompt is empty.", fault=Fault())], IDLE)
    ]


def test_counters_go_with_news_and_when_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("octavo.engine.loop.time", SimpleNamespace(monotonic=lambda: now))
    engine, channel = FakeEngine(), FakeChannel([add(1, 5)])
    loop = EngineLoop(engine, channel)
    for seconds in (0.0, 0.01, STATS_S, 0.01):
        now += seconds
        loop.turn()
    channel.inbox = [AbortRequests([1])]
    loop.turn()
    counted = [isinstance(result, StepResult) and result.stats is not None for result in channel.sent]
    assert counted == [True, False, True, False, True]


def test_a_reader_that_is_behind_delays_nothing_and_misses_nothing(tmp_path: Path) -> None:
    """Whatever was sent before, the engine's last words too."""
    address, count = f"ipc://{tmp_path}/engine", 5000
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.set_hwm(1)
        reader.bind(address)
        engine = EngineSocket(address)
        start = time.monotonic()
        for number in range(count):
            engine.send(StepResult([RequestDelta(number, list(range(200)))], IDLE))
        engine.send(EngineFailed("RuntimeError", "last words"))
        assert time.monotonic() - start < 5
        decoder = msgspec.msgpack.Decoder(FromEngine)
        arrived: list[FromEngine] = [decoder.decode(reader.recv()) for _ in range(count + 1)]
        engine.close()
    ids = [result.deltas[0].request_id for result in arrived if isinstance(result, StepResult)]
    assert ids == list(range(count))
    assert arrived[-1] == EngineFailed("RuntimeError", "last words")


async def test_between_the_engines_end_and_the_news_of_it_requests_are_refused_as_by_a_dead_one(
    tmp_path: Path,
) -> None:
    folder = str(make_tokenizer_folder(tmp_path))
    process = EngineProcess(EngineConfig(model=folder), ENGINE_COMMAND)
    client = EngineClient(process, EngineMetrics("scripted"), Admission(1000, 1_000_000))
    try:
        await client.wait_ready()
        with client.generate([[SLOW, 20]], SamplingParams(max_tokens=100)) as running:
            await anext(running)
            os.kill(process.pid, signal.SIGKILL)
            while Path(f"/proc/{process.pid}/stat").exists():  # the loop doesn't turn: nobody has heard of it
                time.sleep(0.01)
            time.sleep(0.2)  # until the socket has lost its peer
            with pytest.raises(EngineDeadError):
                client.generate([[20]], SamplingParams())
            running.finish(running.first_request_id, 1)
    finally:
        client.close(EngineDeadError("The test is over."))
        process.close()


async def test_a_client_follows_ends_and_loses_its_requests(tmp_path: Path) -> None:
    folder = str(make_tokenizer_folder(tmp_path))
    process = EngineProcess(EngineConfig(model=folder), ENGINE_COMMAND)
    client = EngineClient(process, EngineMetrics("scripted"), Admission(1000, 1_000_000))
    try:
        assert (await client.wait_ready()).limits.vocab_size == 300

        with client.generate([[SAY, 20, 21], [SAY, 30]], SamplingParams(n=2, max_tokens=9)) as generation:
            tokens: dict[int, list[int]] = {}
            async for deltas in generation:
                for delta in deltas:
                    tokens.setdefault(delta.request_id - generation.first_request_id, []).extend(delta.new_token_ids)
        assert tokens == {0: [20, 21, END], 1: [20, 21, 20, 21, END], 2: [30, END], 3: [30, 30, END]}

        with client.generate([[SLOW, 20], [SLOW, 30]], SamplingParams(max_tokens=5)) as generation:
            await anext(generation)
            first = generation.first_request_id
            generation.finish(first, 1)
            rest = [delta async for deltas in generation for delta in deltas]
            assert {delta.request_id for delta in rest} == {first + 1}

        with client.generate([[SLOW, 20]], SamplingParams(max_tokens=100)) as generation:
            await anext(generation)
            generation.abort()
            assert [deltas async for deltas in generation] == []

        with client.generate([[SLOW, 20]], SamplingParams(max_tokens=100)) as generation:
            await anext(generation)
            process.close()
            with pytest.raises(EngineDeadError):
                async for _ in generation:
                    pass
        assert client.is_dead
        with pytest.raises(EngineDeadError):
            client.generate([[20]], SamplingParams())
    finally:
        client.close(EngineDeadError("The test is over."))
        process.close()

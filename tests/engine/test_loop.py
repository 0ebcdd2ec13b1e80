"""The engine's process: its loop over fakes, its socket, and a real one behind a client."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from msgspec import structs

from octavo.api.admission import Admission
from octavo.api.engine_client import EngineClient
from octavo.api.engine_process import EngineProcess
from octavo.api.metrics import IDLE, EngineMetrics
from octavo.core.scheduler_stats import SchedulerStats
from octavo.core.step import RequestDelta
from octavo.engine.loop import MAX_UNREAD_RESULTS, STATS_S, EngineLoop, SocketChannel
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.ipc.messages import AbortRequests, AddRequest, FinishRequest, FromEngine, StepResult, ToEngine
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
    memory_roof_share: float | None = None

    def add_request(self, request: AddRequest) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequestError("The prompt is empty.")
        self.open.append(request.request_id)

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
    waits: list[bool] = field(default_factory=list)
    has_room: bool = True

    def wait(self, until_writable: bool) -> None:
        self.waits.append(until_writable)

    def receive(self) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> bool:
        if self.has_room:
            self.sent.append(message)
        return self.has_room


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
    assert channel.waits == [False, False]
    assert engine.num_steps == 2


def test_requests_end_between_steps() -> None:
    engine = FakeEngine()
    channel = FakeChannel([add(1, 5), add(2, 5), AbortRequests([1]), FinishRequest(2, 7)])
    EngineLoop(engine, channel).turn()
    assert engine.calls == [("abort", 1), ("finish", 7)]
    assert channel.sent == [StepResult([], IDLE)]


def test_a_request_that_the_engine_refuses_ends_with_its_message() -> None:
    channel = FakeChannel([add(1)])
    EngineLoop(FakeEngine(), channel).turn()
    assert channel.sent == [StepResult([RequestDelta(1, [], None, "error", error="The prompt is empty.")], IDLE)]


def test_a_reader_that_is_behind_gets_several_steps_in_one_message() -> None:
    channel = FakeChannel([add(1, 5)], has_room=False)
    loop = EngineLoop(FakeEngine(), channel)
    loop.turn()
    loop.turn()
    channel.has_room = True
    loop.turn()
    assert channel.sent == [StepResult([RequestDelta(1, [n]) for n in (1, 2, 3)], structs.replace(IDLE, num_running=1))]


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


def test_an_idle_engine_with_unsent_deltas_also_waits_for_room() -> None:
    engine, channel = FakeEngine(), FakeChannel([add(1, 5)], has_room=False)
    loop = EngineLoop(engine, channel)
    loop.turn()
    engine.open.clear()
    loop.turn()
    assert channel.waits == [False, True]


def test_sending_to_a_reader_that_never_reads_does_not_block(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.set_hwm(1)
        reader.bind(address)
        channel = SocketChannel(address)
        result = StepResult([RequestDelta(1, list(range(500)))], IDLE)
        num_sent = 0
        while channel.send(result):
            num_sent += 1
        assert num_sent >= MAX_UNREAD_RESULTS
        channel.close(grace_ms=0)


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

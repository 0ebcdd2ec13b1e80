"""Grammars: requests that wait for theirs hold nobody up, and a grammar that fails is its request's alone."""

import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from octavo.core.request import RequestLimits
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import RequestDelta
from octavo.engine.grammars import Grammars
from octavo.engine.llm_engine import LLMEngine
from octavo.errors import CheckpointError, InvalidRequestError
from octavo.ipc.messages import AddRequest
from octavo.sampling_params import SamplingParams, StructuredOutputs
from octavo.text.grammar import GrammarCompiler
from tests.core.fake_executor import VOCAB_SIZE, FakeExecutor, naive_output

BLOCK_SIZE, NUM_BLOCKS = 4, 64
NONE_ALLOWED, ALL_ALLOWED = bytes(1), b"\xff" * (VOCAB_SIZE // 8)


class FakeMatcher:
    """Its mask counts the accepted tokens, or allows all for the regex "."; that of "!" fails at the first."""

    def __init__(self, regex: str) -> None:
        self.regex = regex
        self.accepted: list[int] = []
        self.mask = ALL_ALLOWED if regex == "." else NONE_ALLOWED

    def copy(self) -> "FakeMatcher":
        return copy.deepcopy(self)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)
        self.mask = self.mask if self.regex == "." else bytes([len(self.accepted)])
        if self.regex == "!":
            raise InvalidRequestError("too complex")


@dataclass
class FakeCompiler:
    """Compiles at once, but "slow" when it is let, and "bad" not at all."""

    may_go_on: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)
    known: set[str | None] = field(default_factory=set)

    def find(self, structure: StructuredOutputs) -> FakeMatcher | None:
        return FakeMatcher(str(structure.regex)) if structure.regex in self.known else None

    def compile(self, structure: StructuredOutputs) -> FakeMatcher:
        assert structure.regex is not None
        if structure.regex == "slow":
            self.started.set()
            self.may_go_on.wait(10)
        if structure.regex == "bad":
            raise InvalidRequestError("bad grammar")
        if structure.regex == "bug":
            raise ZeroDivisionError("a bug")
        return FakeMatcher(structure.regex)


@pytest.fixture
def compiler() -> Iterator[FakeCompiler]:
    compiler = FakeCompiler()
    yield compiler
    compiler.may_go_on.set()


@pytest.fixture
def grammars(compiler: FakeCompiler) -> Grammars:
    return Grammars(lambda: cast(GrammarCompiler, compiler))


@pytest.fixture
def engine(grammars: Grammars) -> LLMEngine:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    )
    limits = RequestLimits(vocab_size=VOCAB_SIZE, max_model_len=64, kv_capacity_tokens=NUM_BLOCKS * BLOCK_SIZE)
    return LLMEngine(scheduler, FakeExecutor(NUM_BLOCKS, BLOCK_SIZE), limits, frozenset(), grammars=grammars)


def add(engine: LLMEngine, request_id: int, regex: str | None = None, **params: Any) -> None:
    structure = None if regex is None else StructuredOutputs(regex=regex)
    sampling_params = SamplingParams(max_tokens=4, structured_outputs=structure, **params)
    engine.add_request(
        AddRequest(request_id=request_id, prompt_token_ids=[1, 2, request_id], sampling_params=sampling_params)
    )


def run(engine: LLMEngine, *until: int) -> list[RequestDelta]:
    """Step until these requests have ended."""
    deltas: list[RequestDelta] = []
    while not {delta.request_id for delta in deltas if delta.finish_reason}.issuperset(until):
        deltas += engine.step()
        engine.scheduler.check()
    return deltas


def test_others_run_while_a_request_waits_for_its_grammar(engine: LLMEngine, compiler: FakeCompiler) -> None:
    add(engine, 0, "slow")
    assert compiler.started.wait(10)
    add(engine, 1)
    add(engine, 2, "quick")
    ended = {delta.request_id for delta in run(engine, 1, 2)}
    assert ended == {1, 2}
    assert engine.stats().num_waiting == 1
    compiler.may_go_on.set()
    assert run(engine, 0)[-1].finish_reason == "length"


def test_the_engine_does_not_spin_while_it_waits(engine: LLMEngine, compiler: FakeCompiler) -> None:
    add(engine, 0, "slow")
    assert compiler.started.wait(10)
    compiler.may_go_on.set()
    num_steps = 0
    while engine.has_unfinished_requests:
        engine.step()
        num_steps += 1
    assert num_steps < 1000


def test_a_grammar_that_was_compiled_before_keeps_nobody_waiting(engine: LLMEngine, compiler: FakeCompiler) -> None:
    add(engine, 0, "quick")
    run(engine, 0)
    compiler.known.add("slow")
    add(engine, 1, "slow")
    add(engine, 2)
    assert {delta.request_id for delta in engine.step()} == {1, 2}


@pytest.mark.parametrize(("regex", "is_invalid", "message"), [("bad", True, "bad"), ("bug", False, "ZeroDivision")])
def test_a_grammar_that_can_not_be_built_fails_its_request_alone(
    engine: LLMEngine, regex: str, is_invalid: bool, message: str
) -> None:
    add(engine, 0, regex)
    add(engine, 1)
    (failed,) = [delta for delta in run(engine, 0, 1) if delta.request_id == 0]
    assert failed.finish_reason == "error"
    assert failed.is_invalid == is_invalid
    assert message in (failed.error or "")
    assert engine.stats().num_finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}


def test_a_tokenizer_that_can_not_be_loaded_fails_structured_requests_only(engine: LLMEngine) -> None:
    def fail() -> GrammarCompiler:
        raise CheckpointError("no tokenizer.json")

    engine.grammars = Grammars(fail)
    add(engine, 0, "x")
    add(engine, 1)
    deltas = [delta for delta in run(engine, 0, 1) if delta.request_id == 0]
    assert [(delta.finish_reason, delta.is_invalid) for delta in deltas] == [("error", False)]


@pytest.mark.parametrize("is_built", [False, True])
def test_an_aborted_request_leaves_no_matcher(engine: LLMEngine, compiler: FakeCompiler, is_built: bool) -> None:
    add(engine, 0, "slow")
    assert compiler.started.wait(10)
    if is_built:
        compiler.may_go_on.set()
        while engine.stats().num_waiting:
            engine.step()
    engine.abort(0)
    compiler.may_go_on.set()
    add(engine, 1, "quick")
    run(engine, 1)
    assert engine.stats().num_finished["abort"] == 1
    assert engine.grammars.constrained([0, 1]) == []


def test_masks_follow_what_was_accepted(engine: LLMEngine) -> None:
    add(engine, 0, "x")
    add(engine, 1)
    while not engine.grammars.constrained([0]):
        engine.step()
    assert engine.grammars.constrained([0, 1]) == [0]
    assert engine.grammars.masks([0]) == ({0: (NONE_ALLOWED,)}, {})
    engine.grammars.accept({0: [7]})
    engine.grammars.accept({0: [8]})
    assert engine.grammars.masks([0]) == ({0: (bytes([2]),)}, {})


def test_a_matcher_that_fails_ends_its_request_as_invalid(engine: LLMEngine) -> None:
    add(engine, 0, "!")
    while not engine.grammars.constrained([0]):
        engine.step()
    engine.grammars.accept({0: [7]})
    assert engine.grammars.masks([0])[1] == {0: "too complex"}
    (failed,) = [delta for delta in run(engine, 0) if delta.finish_reason]
    assert failed.is_invalid


def test_drafts_have_masks_of_their_own_and_change_no_matcher(engine: LLMEngine) -> None:
    """The fake's mask is the number of accepted tokens: after one it allows token 0, after two token 1, and so on."""
    add(engine, 0, "x")
    while not engine.grammars.constrained([0]):
        engine.step()
    engine.grammars.accept({0: [7]})
    engine.grammars.foresee({0: [0, 1, 5, 2]})
    masks = [bytes([number]) for number in (1, 2, 3, 3, 3)]
    assert engine.grammars.masks([0]) == ({0: masks}, {})
    assert engine.grammars.masks([0]) == ({0: (bytes([1]),)}, {})


def test_a_step_that_verifies_drafts_has_a_mask_for_each_row_and_grammars_follow_what_it_accepts(
    engine: LLMEngine,
) -> None:
    executor = cast(FakeExecutor, engine.executor)
    add(engine, 0, ".")
    deltas: list[RequestDelta] = []
    while not deltas:
        deltas = engine.step()
    request = engine.scheduler._requests[0]
    good = naive_output(request)[1]
    engine.scheduler.set_drafts(0, [good, (naive_output(request)[2] + 1) % VOCAB_SIZE])
    engine.submit()
    assert [entry.num_logits for entry in executor.steps[-1].entries] == [3]
    deltas += engine.collect()
    assert executor.masks[-1] == {0: [ALL_ALLOWED] * 3}
    assert [len(delta.new_token_ids) for delta in deltas] == [1, 2]
    engine.grammars.masks([])
    matcher = cast(FakeMatcher, engine.grammars._matchers[0])
    assert matcher.accepted == naive_output(request)[:3]

"""Whatever a request holds, others are served as before: their streams, /health and the memory there is.

What counts as harm goes beyond what was seen before the first body, three times in a row for the same body: the machine
may be busy with something else.
`OCTAVO_ADVERSARY_SECONDS` sets how long the slow tests take; 600 each unless given.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.adversary import Adversary, Case
from tests.server.running import RunningServer, scripted
from tests.server.witness import Seen, Witness
from tests.smollm2 import gguf_path

SECONDS = float(os.environ.get("OCTAVO_ADVERSARY_SECONDS", "600"))
NUM_TRIES = 3
ANSWER_S = 20.0
"""Clients leave after so long."""
SETTLE_S = 0.05
MAX_HEALTH_S = 0.1
MAX_GAP_S = 0.25
"""Beyond the engine's own pace: the API's share of it is what /health shows."""
MAX_GROWTH = (1536 << 20, 512 << 20)
"""Bytes that the API's processes, and the engine's, may take beyond what they had before; for a moment."""
MAX_KEPT = (400 << 20, 400 << 20)
"""Bytes that they may have kept in the end: processes that read bodies, and pages of the KV pool not used before."""
PACE_S = 0.02
HEADERS = {"Content-Type": "application/json"}
VICTIM = {"prompt": "<slow>abc", "max_tokens": 15_000, "stream": True}
OPTIONS = ["--max-model-len", "16k", "--max-num-seqs", "64", "--access-log=off"]
REAL_VICTIM = {"prompt": "Once upon a time", "max_tokens": 6000, "ignore_eos": True, "stream": True}
REAL_OPTIONS = ["--model", gguf_path(), "--port", "0", "--max-num-seqs", "64", "--access-log=off"]


class Trial:
    """Sends cases one after the other, and collects what harm they did."""

    def __init__(self, http: httpx.Client, witness: Witness, pace_s: float) -> None:
        self._http = http
        self._witness = witness
        self._pace_s = pace_s
        self.harm: list[str] = []
        time.sleep(1)
        self._before = witness.look()

    def run(self, cases: Iterable[Case]) -> int:
        num_cases = 0
        for case in cases:
            harms: list[str] = []
            while len(harms) < NUM_TRIES and (harm := self._try(case)):
                harms.append(harm)
            if len(harms) == NUM_TRIES:
                self.harm.append(f"{case}: {min(harms, key=len)}")
                print(self.harm[-1], flush=True)
            num_cases += 1
        return num_cases

    def check_memory_is_back(self) -> None:
        time.sleep(2)
        self._witness.look()
        time.sleep(0.2)
        kept = [now - before for now, before in zip(self._witness.look().memory, self._before.memory, strict=True)]
        assert all(num_bytes < most for num_bytes, most in zip(kept, MAX_KEPT, strict=True)), kept

    def _try(self, case: Case) -> str:
        """What harm the case did; "" for none."""
        body = case.body
        self._witness.look()
        wrong = self._post(case.path, body)
        time.sleep(SETTLE_S)
        return ", ".join(filter(None, [wrong, *self._complaints(self._witness.look())]))

    def _post(self, path: str, body: bytes) -> str:
        try:
            response = self._http.post(path, content=body, headers=HEADERS)
        except httpx.ReadTimeout:
            return ""  # long answers are no harm
        except httpx.TransportError as error:
            return repr(error)
        if response.status_code < 500:
            return ""
        said = response.json()["error"]
        is_busy = response.status_code == 503 and said["code"] == "engine_busy"
        return "" if is_busy else f"{response.status_code} {said['message'][:100]}"

    def _complaints(self, seen: Seen) -> Iterator[str]:
        if seen.trouble:
            yield seen.trouble
        if seen.health > MAX_HEALTH_S + self._before.health:
            yield f"/health took {seen.health:.3f} s"
        if seen.gap > MAX_GAP_S + max(self._pace_s, self._before.gap):
            yield f"a stream stood still for {seen.gap:.3f} s"
        for name, now, before, most in zip(
            ("API", "engine"), seen.memory, self._before.memory, MAX_GROWTH, strict=True
        ):
            if now - before > most:
                yield f"the {name} grew by {(now - before) >> 20} MiB"


def trial(server: RunningServer, victim: dict[str, Any], pace_s: float, cases: Iterable[Case]) -> list[str]:
    """What harm was done."""
    with Witness(server.url, "/v1/completions", victim, server.process.pid, server.engine.pid) as witness:
        with httpx.Client(base_url=server.url, timeout=ANSWER_S) as http:
            done = Trial(http, witness, pace_s)
            print(f"{done.run(cases)} cases")
        done.check_memory_is_back()
    return done.harm


@pytest.fixture
def adversary(server: RunningServer) -> Adversary:
    return Adversary(httpx.get(f"{server.url}/openapi.json").json())


@pytest.fixture
def victim_server(tokenizer_folder: Path) -> Iterator[RunningServer]:
    with scripted(tokenizer_folder, *OPTIONS) as running:
        yield running.wait_ready()


def shuffled(cases: Iterable[Case], seed: int) -> list[Case]:
    in_order = list(cases)
    random.Random(seed).shuffle(in_order)
    return in_order


def for_seconds(cases: Iterable[Case], seconds: float) -> Iterator[Case]:
    until = time.monotonic() + seconds
    for case in cases:
        if time.monotonic() > until:
            return
        yield case


def test_no_body_of_half_a_megabyte_harms_others(adversary: Adversary, victim_server: RunningServer) -> None:
    """One value for each field, on one of its routes."""
    of_field = {case.description.split(":")[0]: case for case in shuffled(adversary.cases(1 << 19), seed=5)}
    assert trial(victim_server, VICTIM, PACE_S, of_field.values()) == []


BIAS = {str(token_id): 1.0 for token_id in range(10, 299)}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SEEN: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
    (TEXT, "prompts that are objects", lambda: {"prompt": [{}] * 100_000}),
    (CHAT, "numbers for messages", lambda: {"messages": list(range(300_000))}),
    (CHAT, "empty messages", lambda: {"messages": [{"role": "user", "content": ""}] * 100_000}),
    (CHAT, "a long role", lambda: {"messages": [{"role": "x" * 8_000_000, "content": "x"}]}),
    (CHAT, "documents", lambda: {"messages": [{"role": "a", "content": "b"}], "documents": [{"t": "x" * 4_000_000}]}),
    (TEXT, "a long stop string for many choices", lambda: {"prompt": "x", "stop": "y" * 20_000, "n": 128}),
    (TEXT, "a bias for every token and prompt", lambda: {"prompt": ["x"] * 2048, "logit_bias": BIAS, "max_tokens": 1}),
    (TEXT, "repeated ids", lambda: {"prompt": ["x"] * 64, "allowed_token_ids": [40, 41] * 1_000_000}),
    (TEXT, "repeated stop tokens", lambda: {"prompt": "x", "stop_token_ids": [40, 41, 42] * 1_000_000}),
    (TEXT, "long bad words", lambda: {"prompt": ["x"] * 64, "bad_words": ["y" * 5000] * 256}),
    (TEXT, "a long prompt's log-probabilities", lambda: {"prompt": [[40] * 4000] * 4, "prompt_logprobs": 20}),
    (TEXT, "many echoes", lambda: {"prompt": ["abcd" * 20] * 512, "logprobs": 5, "echo": True, "max_tokens": 2}),
]


def _json(fields: Callable[[], dict[str, Any]]) -> str:
    return json.dumps(fields())


def test_what_was_seen_to_harm_others_does_not(victim_server: RunningServer) -> None:
    cases = [Case(path, name, partial(_json, fields)) for path, name, fields in SEEN]
    assert trial(victim_server, VICTIM, PACE_S, cases) == []


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_no_body_harms_others(adversary: Adversary, victim_server: RunningServer) -> None:
    cases = for_seconds(shuffled(adversary.cases(16_000_000), seed=7), SECONDS)
    assert trial(victim_server, VICTIM, PACE_S, cases) == []


@pytest.fixture
def smollm2() -> Iterator[RunningServer]:
    with RunningServer("octavo.entrypoints.openai.api_server", *REAL_OPTIONS) as running:
        yield running.wait_ready()


def ordinary_gap(server: RunningServer, witness: Witness) -> float:
    """How long a stream stands still while others read long prompts and have many choices."""
    with httpx.Client(base_url=server.url, timeout=120) as http:
        witness.look()
        for prompt in ("long ago " * 1500, ["a", "b"]):
            http.post("/v1/completions", json={"prompt": prompt, "n": 16, "max_tokens": 8}).raise_for_status()
        return witness.look().gap


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_no_body_harms_others_on_a_real_engine(adversary: Adversary, smollm2: RunningServer) -> None:
    server = smollm2
    with Witness(server.url, "/v1/completions", REAL_VICTIM, server.process.pid, server.engine.pid) as witness:
        pace_s = ordinary_gap(server, witness)
    print(f"ordinary gap: {pace_s:.3f} s")
    cases = for_seconds(shuffled(adversary.cases(16_000_000), seed=9), SECONDS)
    assert trial(server, REAL_VICTIM, pace_s, cases) == []

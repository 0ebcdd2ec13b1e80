"""What crosses between the API process and the engine process, as msgpack.

Plain data; the field types are those of `core/step.py` and `sampling_params.py`.
"""

import msgspec

from octavo.core.request import RequestLimits
from octavo.core.scheduler_stats import SchedulerStats
from octavo.core.step import RequestDelta
from octavo.resolve import ResolvedConfig
from octavo.sampling_params import SamplingParams

__all__ = [
    "AbortRequests",
    "AddPooling",
    "AddRequest",
    "EngineFailed",
    "EngineInfo",
    "EngineReady",
    "FinishRequest",
    "FromEngine",
    "StepResult",
    "ToEngine",
]


class AddRequest(msgspec.Struct, tag="add", frozen=True, kw_only=True):
    """Queue a prompt's `n` completions."""

    request_id: int
    """Of the first; the others' follow."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams | None
    """None: the request's before, which was sent together with this one."""
    priority: int = 0
    cache_salt: str | None = None


class AddPooling(msgspec.Struct, tag="pool", frozen=True, kw_only=True):
    """Queue one text that is to become an embedding."""

    request_id: int
    prompt_token_ids: list[int]
    priority: int = 0
    cache_salt: str | None = None


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    request_ids: list[int]


class FinishRequest(msgspec.Struct, tag="finish", frozen=True):
    """A stop string was completed by the request's `num_tokens`-th generated token."""

    request_id: int
    num_tokens: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the API process needs to know of the model and of the engine."""

    limits: RequestLimits
    eos_token_ids: list[int]
    embedding_size: int = 0
    """Numbers in an embedding, before it is cut."""
    config: ResolvedConfig
    start_seconds: dict[str, float]
    """Seconds each stage of the start took, in order."""


class EngineReady(msgspec.Struct, tag="ready", frozen=True):
    info: EngineInfo


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The engine could not start, or stops: `kind` is the error's class name."""

    kind: str
    message: str


class StepResult(msgspec.Struct, tag="step", frozen=True):
    """Deltas of one or more steps, in order."""

    deltas: list[RequestDelta]
    stats: SchedulerStats | None = None
    """The scheduler's counters after them, where they are worth a message: see `EngineLoop`."""
    started: dict[int, float] = {}
    """Requests that were scheduled for the first time, and when, on the clock of `time.monotonic`."""
    memory_roof_share: float | None = None
    """How near the latest decode steps came to what memory allows, where that is known; comes with the counters."""


ToEngine = AddRequest | AddPooling | AbortRequests | FinishRequest
FromEngine = EngineReady | EngineFailed | StepResult

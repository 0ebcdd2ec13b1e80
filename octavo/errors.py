"""Every error octavo raises on purpose.

    OctavoError
    ├── ConfigError               an option's value, or a combination of options, that can't work
    ├── CheckpointError           model files that are missing, damaged, or not what they claim
    │   └── UnknownArchitectureError
    ├── InvalidRequestError       one request's fault: HTTP 400
    │   ├── ContextLengthError    prompt (plus output) longer than the model or the KV pool allows
    │   └── ModelNotFoundError    another model than the served one: HTTP 404
    ├── RequestFailedError        the engine's fault, for one request: HTTP 500
    │   ├── RequestTimeoutError   it took longer than --request-timeout: HTTP 504
    │   └── TierFailedError       it is longer than the KV pool, and what held the rest has failed
    ├── EngineBusyError           refused before it was queued: HTTP 429 with Retry-After
    └── EngineDeadError           the engine process is gone: HTTP 503

A message names the value, the limit and the option that changes it. `assert` is for our own invariants, never for
what a user typed.
"""

from typing import Literal

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "EngineBusyError",
    "EngineDeadError",
    "InvalidRequestError",
    "LimitName",
    "ModelNotFoundError",
    "OctavoError",
    "RequestFailedError",
    "RequestTimeoutError",
    "TierFailedError",
    "UnknownArchitectureError",
]


class OctavoError(Exception):
    """Base of every error octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """An option's value, or a combination of options, that can't work."""


class CheckpointError(OctavoError):
    """Model files that are missing, damaged, or not what they claim to be. Names the file or the tensor."""


class UnknownArchitectureError(CheckpointError):
    """The checkpoint's architecture has no model file here. Lists those that have one."""


class InvalidRequestError(OctavoError, ValueError):
    """A request that can't be served as asked.

    `param` is the request field at fault, `code` OpenAI's machine-readable code; both may be None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


LimitName = Literal["model", "kv_cache", "kv_cache_of_inputs"]
"""What sets the most tokens of a request."""

LIMIT_OPTIONS: dict[LimitName, str] = {
    "model": "--max-model-len",
    "kv_cache": "--kv-cache-memory-bytes or --gpu-memory-utilization, and may be raised by --swap-space",
    "kv_cache_of_inputs": "--kv-cache-memory-bytes",
}


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt and the asked-for output, exceed what the model or the KV pool can hold.

    `message` has the numbers, and advice; with a `limit` it is an open sentence, which the option that sets it ends.
    """

    def __init__(self, message: str, param: str | None = None, limit: LimitName | None = None) -> None:
        if limit is not None:
            message = f"{message}; the server's limit is set by {LIMIT_OPTIONS[limit]}."
        super().__init__(message, param, "context_length_exceeded")


class ModelNotFoundError(InvalidRequestError):
    """The request asks for another model than the one that is served."""


class RequestFailedError(OctavoError):
    """The engine could not finish this request. Others are not affected."""


class RequestTimeoutError(RequestFailedError):
    """The request took longer than --request-timeout allows."""


class TierFailedError(RequestFailedError):
    """The request is longer than the KV pool, and the tier that held the rest has failed."""

    def __init__(self, num_tokens: int, kv_capacity_tokens: int) -> None:
        super().__init__(
            f"The request has {num_tokens} tokens, the KV pool holds {kv_capacity_tokens}, and writing to the tier "
            "that held the rest (--kv-cache-dir) has failed."
        )


class EngineBusyError(OctavoError):
    """Refused before it was queued. `retry_after_s` is when to come back, in seconds; `reason` names the full queue's
    measure: queued_reqs or queued_tokens."""

    def __init__(self, message: str, retry_after_s: float, reason: str = "queued_reqs") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class EngineDeadError(OctavoError):
    """The engine process is gone; no request can be served until it is started again."""

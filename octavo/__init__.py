"""octavo: an LLM inference and serving engine. The public names; each is imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.errors import (
        CheckpointError,
        ConfigError,
        ContextLengthError,
        EngineBusyError,
        EngineDeadError,
        InvalidRequestError,
        OctavoError,
        RequestFailedError,
        RequestTimeoutError,
        UnknownArchitectureError,
    )
    from octavo.llm import LLM
    from octavo.options import EngineConfig
    from octavo.outputs import BeamSearchOutput, EmbeddingOutput, RequestOutput
    from octavo.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputs
    from octavo.server.options import ServerConfig

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "EmbeddingOutput",
    "EngineBusyError",
    "EngineConfig",
    "EngineDeadError",
    "InvalidRequestError",
    "OctavoError",
    "RequestFailedError",
    "RequestOutput",
    "RequestTimeoutError",
    "SamplingParams",
    "ServerConfig",
    "StructuredOutputs",
    "UnknownArchitectureError",
    "__version__",
]

_MODULES = {
    "LLM": "octavo.llm",
    "BeamSearchOutput": "octavo.outputs",
    "EmbeddingOutput": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "EngineConfig": "octavo.options",
    "ServerConfig": "octavo.server.options",
    "BeamSearchParams": "octavo.sampling_params",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutputs": "octavo.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "octavo.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)

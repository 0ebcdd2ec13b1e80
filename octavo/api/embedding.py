"""Embeddings as they leave the engine, turned into vectors. Shared by the server and the offline `LLM`."""

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.model_config import PoolingConfig
from octavo.core.step import RequestDelta
from octavo.errors import InvalidRequestError, RequestFailedError
from octavo.ipc.messages import EngineInfo

__all__ = ["Vector", "check_dimensions", "cut_off", "pooling_of", "vector_of"]

Vector = npt.NDArray[np.float32]


def pooling_of(info: EngineInfo) -> PoolingConfig:
    """Raises InvalidRequestError for an engine that generates."""
    pooling = info.config.runtime.pooling
    if pooling is None:
        raise InvalidRequestError("This model generates text. It embeds when it is served with --runner pooling.")
    return pooling


def check_dimensions(dimensions: int | None, info: EngineInfo) -> None:
    """Raises InvalidRequestError for a size that the model's embeddings can't be cut to."""
    allowed = pooling_of(info).dimensions
    if dimensions is None or (allowed == () and dimensions == info.embedding_size):
        return
    if allowed == ():
        raise InvalidRequestError(
            f"dimensions must be {info.embedding_size} or left out, got {dimensions}: this model's embeddings can't be "
            "cut, since it was not trained for it (matryoshka).",
            param="dimensions",
        )
    if allowed is not None and dimensions not in allowed:
        wish = f"one of {', '.join(map(str, allowed))}"
    elif not 1 <= dimensions <= info.embedding_size:
        wish = f"from 1 to {info.embedding_size}"
    else:
        return
    raise InvalidRequestError(f"dimensions must be {wish}, got {dimensions}.", param="dimensions")


def cut_off(truncate_prompt_tokens: int | None, max_model_len: int) -> int | None:
    """How many tokens of a text's beginning are kept; None: all. Raises InvalidRequestError for other values."""
    if truncate_prompt_tokens is None or 1 <= truncate_prompt_tokens <= max_model_len:
        return truncate_prompt_tokens
    if truncate_prompt_tokens == -1:
        return max_model_len
    raise InvalidRequestError(
        f"truncate_prompt_tokens must be -1 or from 1 to {max_model_len}, the model's limit, got "
        f"{truncate_prompt_tokens}.",
        param="truncate_prompt_tokens",
    )


def vector_of(
    delta: RequestDelta, pooling: PoolingConfig, dimensions: int | None = None, normalizes: bool | None = None
) -> Vector:
    """The request's embedding, cut to `dimensions`. `normalizes`: whether it is brought to length 1 then; None: as the
    model's are.

    Raises RequestFailedError where the engine gave the request up.
    """
    if delta.fault is not None:
        raise InvalidRequestError(delta.error or "", delta.fault.param, delta.fault.code)
    if delta.embedding is None:
        raise RequestFailedError(delta.error or "The engine aborted the request.")
    numbers = np.frombuffer(delta.embedding, dtype="<f4")
    vector, length = numbers[:-1], numbers[-1]
    is_cut = dimensions is not None and dimensions < len(vector)
    vector = vector[:dimensions] if is_cut else vector
    wanted = pooling.normalize if normalizes is None else normalizes
    if wanted and (is_cut or not pooling.normalize):
        cut_length: np.float32 = max(np.linalg.norm(vector), np.float32(1e-12))
        return np.asarray(vector / cut_length, np.float32)
    return np.asarray(vector * length, np.float32) if pooling.normalize and not wanted else vector

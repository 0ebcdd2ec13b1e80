"""BodyReader: runs the handlers of requests with a body, where it can't delay others.

Parsing, checking, templating and tokenising what a client has sent takes time with its size and its kind, and holds
Python's lock. So a handler only prepares: what it returns is a response that has not begun, plain data. A light body's
handler runs on the event loop; any other's in a process of its own, `python -m octavo.server.body_reader`, from which
the response comes back.
"""

import asyncio
import contextlib
import gc
import io
import os
import pickle
import signal
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequestError, OctavoError
from octavo.ipc.messages import EngineInfo
from octavo.options import EngineConfig
from octavo.server.helper_process import (
    HelperDied,
    HelperProcess,
    limit_seconds,
    questions,
    resident_bytes,
    run_helper,
    send_answer,
)
from octavo.server.options import ServerConfig

if TYPE_CHECKING:
    from fastapi import Response

__all__ = ["BodyReader", "Handle", "Resident"]

LIGHT_BYTES = 64 << 10
LIGHT_QUOTES = 2048
LIGHT_OBJECTS = 512
"""What takes the event loop a few milliseconds at most; texts are tokenised in a thread."""
LARGE_BYTES = 512 << 10
"""Larger bodies are read apart from the others: these do not wait for them."""
TIME_LIMIT_S = 20.0
"""Of computing."""
MEMORY_LIMIT_BYTES = 2 << 30
MAX_KEPT_BYTES = 64 << 20
"""Memory that a process may keep between two bodies."""
NICENESS = 5
"""The engine's steps go first."""

Handle = Callable[[bytes, str, "Resident"], Awaitable["Response"]]
"""From a body and a request's id to the response; a function of a module, which the process imports."""
Resident = Mapping[str, Any]
"""Objects that exist in both processes, by their names: a response comes back with the server's own."""


class BodyReader:
    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig, info: EngineInfo) -> None:
        start = pickle.dumps((engine_config, server_config, info))
        self._small, self._large = HelperProcess(__name__, start), HelperProcess(__name__, start)

    async def respond(self, handle: Handle, body: bytes, request_id: str, resident: Resident) -> "Response":
        """Raises what the handler raises, and InvalidRequestError for a body that takes too long or too much memory."""
        if _is_light(body):
            return await handle(body, request_id, resident)
        helper = self._small if len(body) <= LARGE_BYTES else self._large
        try:
            answer = await helper.ask(pickle.dumps((handle, request_id, body)))
        except HelperDied as death:
            raise InvalidRequestError(_last_words(death.status)) from None
        response = _Unpickler(io.BytesIO(answer), resident).load()
        if isinstance(response, Exception):
            raise response
        return response  # type: ignore[no-any-return]

    def close(self) -> None:
        self._small.close()
        self._large.close()


def _is_light(body: bytes) -> bool:
    if len(body) > LIGHT_BYTES or body.count(b'"') > LIGHT_QUOTES:
        return False
    return body.count(b"{") + body.count(b"[") <= LIGHT_OBJECTS


def _last_words(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"The body takes longer than {TIME_LIMIT_S:g} s to read. Make it smaller or simpler."
    return "The body takes too much memory to read, or nests too deeply. Make it smaller or simpler."


class _Pickler(pickle.Pickler):
    """Names the resident objects instead of writing them."""

    def __init__(self, stream: io.BytesIO, resident: Resident) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._names = {id(thing): name for name, thing in resident.items()}

    def persistent_id(self, thing: Any) -> str | None:
        return self._names.get(id(thing))


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, resident: Resident) -> None:
        super().__init__(stream)
        self._resident = resident

    def persistent_load(self, name: str) -> Any:
        return self._resident[name]


# ---- the other process


def _serve() -> None:
    asked = questions()
    resident = _load(*pickle.loads(next(asked)))
    gc.freeze()
    gc.disable()  # what is made for a body is dropped as a whole
    kept = resident_bytes() + MAX_KEPT_BYTES
    with asyncio.Runner() as runner:
        for question in asked:
            limit_seconds(TIME_LIMIT_S)
            answer = runner.run(_answer(question, resident))
            limit_seconds(0)
            del question
            send_answer(answer)
            del answer
            gc.collect()
            if resident_bytes() > kept:
                os._exit(0)  # the next body is read by a new one


def _load(engine_config: EngineConfig, server_config: ServerConfig, info: EngineInfo) -> Resident:
    from octavo.server.served_model import load_resident

    return load_resident(engine_config, server_config, info)


async def _answer(question: bytes, resident: Resident) -> bytes:
    try:
        handle, request_id, body = pickle.loads(question)
        response: object = await handle(body, request_id, resident)
    except OctavoError as error:
        response = error.with_traceback(None)
        response.__cause__ = response.__context__ = None
    except MemoryError:
        os._exit(1)
    except Exception as error:
        traceback.print_exc()
        response = RuntimeError(f"A body could not be read: {type(error).__name__}")
    stream = io.BytesIO()
    _Pickler(stream, resident).dump(response)
    return stream.getvalue()


def main() -> None:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, this goes first
    run_helper(_serve, MEMORY_LIMIT_BYTES)


if __name__ == "__main__":
    main()

"""The engine's process: from its launch to its end.

Run as `python -m octavo.engine.process` by `api/engine_process.py`. Imports torch only once it watches its parent.
"""

import errno
import gc
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from octavo.engine.loop import Engine, EngineLoop
from octavo.errors import ConfigError, OctavoError
from octavo.ipc.launch import NOT_FOR_THE_ENGINE, read_launch
from octavo.ipc.messages import EngineFailed, EngineInfo, EngineReady
from octavo.ipc.output import never_wait_for_readers
from octavo.ipc.pulse import Pulse, start_beating
from octavo.ipc.sockets import EngineSocket
from octavo.options import EngineConfig

__all__ = ["BuildEngine", "failure", "main"]

NO_MEMORY = ("allocate memory", "not enough memory", "failed to map segment")
"""Words of torch's allocator, and of the loader when torch itself has no room."""
MORE_MEMORY = (
    "Raise the limit on this process's memory (ulimit -v, or the container's), or lower --kv-cache-memory-bytes, "
    "--max-num-seqs or --max-num-batched-tokens."
)
BuildEngine = Callable[[EngineConfig], tuple[Engine, EngineInfo]]


def _end_with_parent(folder: str) -> None:
    """Wait for the end of standard input: only the parent's death or its wish closes it."""
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def failure(error: Exception) -> EngineFailed:
    """What the API process is told. Nobody needs the traceback of an octavo error, or of memory that ran out."""
    if _is_out_of_memory(error):
        return EngineFailed(ConfigError.__name__, f"The engine has not enough memory ({error}). {MORE_MEMORY}")
    if not isinstance(error, OctavoError):
        traceback.print_exception(error)
    return EngineFailed(type(error).__name__, str(error) or repr(error))


def _is_out_of_memory(error: Exception) -> bool:
    is_told = any(words in str(error) for words in NO_MEMORY)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or is_told


def _build_engine(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    start = time.perf_counter()
    from octavo.engine.start_log import build_logged_engine

    imports_seconds = time.perf_counter() - start
    engine, info = build_logged_engine(config)
    return engine, msgspec.structs.replace(info, start_seconds={"imports": imports_seconds, **info.start_seconds})


def main(build: BuildEngine | None = None) -> int:
    """Serve until the parent is gone; returns the exit status of an engine that failed."""
    # A SIGTERM to the whole group, say, is the parent's to answer: it drains first.
    for number in NOT_FOR_THE_ENGINE:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_THE_ENGINE)
    never_wait_for_readers()
    launch = read_launch(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, args=(launch.folder,), name="parent-watch", daemon=True).start()
    process_seconds = time.time() - launch.started_at
    channel = EngineSocket(launch.address)
    try:
        engine, info = (build or _build_engine)(launch.config)
        seconds = {"process": process_seconds, **info.start_seconds}
        loop = EngineLoop(engine, channel)
        start_beating(Pulse(launch.folder), loop.progress, loop.is_idle)  # who hears of it next finds it alive
        channel.send(EngineReady(msgspec.structs.replace(info, start_seconds=seconds)))
        gc.freeze()  # what the start made stays: no collection walks over it in the middle of a step
        loop.run()
    except Exception as error:
        channel.send(failure(error))
    channel.close()
    return 1


if __name__ == "__main__":
    sys.exit(main())

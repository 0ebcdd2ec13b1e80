"""Launch: what the API process tells the engine's process at its start, over standard input."""

import pickle
import signal
import struct
from dataclasses import dataclass
from typing import IO

from octavo.options import EngineConfig

__all__ = ["NOT_FOR_THE_ENGINE", "Launch", "read_launch", "write_launch"]

NOT_FOR_THE_ENGINE = frozenset(
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2]
)
"""Signals that the parent answers, or nobody."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Written by pickle, after its length in four bytes: paths may hold bytes that are no text."""

    config: EngineConfig
    folder: str
    """Private to this user; removed by whichever of the two processes ends last."""
    started_at: float
    """Unix time."""

    @property
    def address(self) -> str:
        """The place at which the parent binds its socket and the engine connects."""
        return f"ipc://{self.folder}/engine"


def read_launch(stream: IO[bytes]) -> Launch:
    (num_bytes,) = _LENGTH.unpack(stream.read(_LENGTH.size))
    launch: Launch = pickle.loads(stream.read(num_bytes))
    return launch


def write_launch(launch: Launch, stream: IO[bytes]) -> None:
    message = pickle.dumps(launch)
    stream.write(_LENGTH.pack(len(message)) + message)
    stream.flush()

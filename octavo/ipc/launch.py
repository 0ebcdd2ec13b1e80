"""Launch: what the API process tells the engine's process at its start, over standard input."""

import struct
from typing import IO

import msgspec

from octavo.options import EngineConfig

__all__ = ["Launch", "read_launch", "write_launch"]

_LENGTH = struct.Struct("<I")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Written as msgpack, after its length in four bytes."""

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
    return msgspec.msgpack.decode(stream.read(num_bytes), type=Launch)


def write_launch(launch: Launch, stream: IO[bytes]) -> None:
    message = msgspec.msgpack.encode(launch)
    stream.write(_LENGTH.pack(len(message)) + message)
    stream.flush()

"""The two ends of the way between API process and engine: ZeroMQ sockets that bear msgpack messages.

Sending never waits: what is queued is bounded by the requests that are open and the tokens that they may get.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import cast

import msgspec
import zmq

from octavo.ipc.messages import FromEngine, ToEngine

__all__ = ["ApiSocket", "EngineSocket"]

MAX_TAKEN = 64
"""Messages that the API process takes in one turn of its event loop."""
LAST_WORDS_MS = 2000


class ApiSocket:
    """The API process's end, in its event loop: each message that arrives is handed to `take`."""

    def __init__(self, address: str, take: Callable[[FromEngine], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._receive()

    def send(self, message: ToEngine) -> bool:
        """False when nobody is connected any more: the engine is gone, though its end may not be known yet."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        # Sending may swallow the event that announces an arrival: the descriptor is edge-triggered.
        if _has_message(self._socket):
            self._loop.call_soon(self._receive)
        return True

    def take_all(self) -> None:
        """Take everything that has arrived, now."""
        while self._take_some():
            pass

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(0)
            self._context.term()

    def _receive(self) -> None:
        """Take what has arrived; after a while let others have their turn, for the engine may be faster than this."""
        if self._take_some():
            self._loop.call_soon(self._receive)

    def _take_some(self) -> bool:
        """Take messages; True if there may be more."""
        for _ in range(MAX_TAKEN):
            if self._socket.closed or not _has_message(self._socket):
                return False
            self._take(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        return True


class EngineSocket:
    """The engine's end."""

    def __init__(self, address: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def wait(self) -> None:
        self._socket.poll(None, zmq.POLLIN)

    def receive(self) -> Iterator[ToEngine]:
        while _has_message(self._socket):
            yield self._decoder.decode(self._socket.recv(zmq.NOBLOCK))

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self, grace_ms: int = LAST_WORDS_MS) -> None:
        """Deliver what was sent, if the API process reads it within the time."""
        self._socket.close(grace_ms)
        self._context.term()


def _has_message(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message can be received: what `poll(0)` says, which first makes a poller of its own."""
    return bool(cast(int, socket.get(zmq.EVENTS)) & zmq.POLLIN)

"""What both ends of the way between API process and engine ask of their ZeroMQ sockets."""

from typing import cast

import zmq

__all__ = ["has_message"]


def has_message(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message can be received: what `poll(0)` says, which first makes a poller of its own."""
    return bool(cast(int, socket.get(zmq.EVENTS)) & zmq.POLLIN)

"""A crowd of clients on raw sockets: some read slowly, some leave in the middle."""

import asyncio
import json
import random
import resource
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

__all__ = ["Client", "Crowd", "make_clients"]

SLOW_BUFFER_BYTES = 4096
SLOW_READ_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Client:
    """`leaves_after`: of so many bytes of its answer. `pause_s`: before each of a slow reader's reads."""

    text: str
    pause_s: float = 0.0
    leaves_after: int | None = None

    @property
    def body(self) -> bytes:
        fields = {"prompt": f"<say>{self.text}", "max_tokens": len(self.text) + 1, "stream": True}
        return json.dumps(fields | {"stream_options": {"include_usage": True}}).encode()


class Crowd:
    """All connect first; then all send at once."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def run(self, clients: list[Client]) -> list[bytes | None]:
        """Each client's whole answer, None for one that left."""
        connections = await asyncio.gather(*map(self._connect, clients))
        return await asyncio.gather(*(self._follow(*pair) for pair in zip(clients, connections, strict=True)))

    async def _connect(self, client: Client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setblocking(False)
        if client.pause_s:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
        await asyncio.get_running_loop().sock_connect(connection, self._address)
        return await asyncio.open_connection(sock=connection, limit=SLOW_READ_BYTES if client.pause_s else 65536)

    async def _follow(
        self, client: Client, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> bytes | None:
        reader, writer = connection
        body = client.body
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = bytearray()
        try:
            while piece := await reader.read(SLOW_READ_BYTES if client.pause_s else 65536):
                answer += piece
                if client.leaves_after is not None and len(answer) >= client.leaves_after:
                    return None
                if client.pause_s:
                    await asyncio.sleep(client.pause_s)
            return bytes(answer)
        finally:
            writer.transport.abort()


def make_clients(count: int, max_characters: int, pause_s: float, seed: int) -> list[Client]:
    """Half of them slow, a quarter of them leaving: independently of each other."""
    rng = random.Random(seed)
    clients = []
    for i in range(count):
        text = f"{i}:" + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(1, max_characters)))
        is_slow, leaves = rng.random() < 0.5, rng.random() < 0.25
        clients.append(Client(text, pause_s if is_slow else 0.0, rng.randint(1, 8000) if leaves else None))
    return clients

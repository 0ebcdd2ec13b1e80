"""Bodies: the door that every request with a body comes in by. It is turned away here, or accepted.

Accepted means: its headers fit, requests are taken, and from then on a shutdown waits for it. Its body is read whole
and decoded; memory for large ones is bounded. When its client goes away, the work on it ends. Knows no fields.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.http.content_encoding import ENCODINGS, Damaged, unpack
from octavo.server.http.errors import Error, send_error
from octavo.server.served_model import ServedModel
from octavo.server.service import Service

__all__ = ["Accepted", "Bodies", "Room", "accepted"]

SMALL_BYTES = 64 << 10
"""Bodies up to here are not counted: a connection's own buffers may hold as much."""
MEDIUM_BYTES = 512 << 10
"""Larger ones share a room of their own, so that these never wait for them."""
MAX_HELD = 8
"""Large bodies of the greatest size that may be held at once, until they are parsed."""
MAX_MEDIUM_HELD = 128
ROOM_WAIT_S = 5.0
"""How long a body waits for room before it is refused."""
SLOW_BYTES_PER_S = 256 << 10
SLOW_AFTER_S = 2.0
"""A body that has been arriving for longer, more slowly, gives way to one that waits for room."""
LINGER_S = 1.0
"""How long the rest of a refused body is read and dropped: a client that still sends would miss the answer."""


class Share:
    """What one body takes of a Room."""

    def __init__(self, room: "Room", num_bytes: int) -> None:
        self._room = room
        self.num_bytes = num_bytes
        self.num_arrived = 0
        self.started_at = time.monotonic()
        self.arrival: asyncio.Timeout | None = None
        """While it arrives: what to end, should it be too slow."""

    def shrink(self, num_bytes: int) -> None:
        self._room.num_bytes -= self.num_bytes - num_bytes
        self.num_bytes = num_bytes

    def close(self) -> None:
        self.shrink(0)
        self._room.shares.discard(self)


class Room:
    """Memory for bodies, from before they are read until they are parsed.

    Invariant: `num_bytes` is the sum of the shares, and at most `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.shares: set[Share] = set()
        self._turn = asyncio.Lock()

    async def share(self, num_bytes: int) -> Share:
        """Waits for its turn. Raises TimeoutError when there is no room for long."""
        async with asyncio.timeout(ROOM_WAIT_S), self._turn:
            while self.num_bytes + num_bytes > self.max_bytes:
                self._end_slowest()
                await asyncio.sleep(0.02)
        share = Share(self, num_bytes)
        self.shares.add(share)
        self.num_bytes += num_bytes
        return share

    def _end_slowest(self) -> None:
        now = time.monotonic()
        ages = {s: now - s.started_at for s in self.shares if s.arrival is not None and s.arrival.when() is None}
        rates = {s: s.num_arrived / age for s, age in ages.items() if age > SLOW_AFTER_S}
        if rates and min(rates.values()) < SLOW_BYTES_PER_S:
            slowest = min(rates, key=rates.__getitem__)
            assert slowest.arrival is not None
            slowest.arrival.reschedule(0)


class Accepted:
    """An accepted request's model, and its body until that is parsed."""

    def __init__(self, model: ServedModel, body: bytes, share: Share | None) -> None:
        self.model = model
        self._body = body
        self._share = share

    @contextlib.contextmanager
    def body(self) -> Iterator[bytes]:
        """Afterwards it is dropped, and no longer counted: the answer may take long."""
        try:
            yield self._body
        finally:
            self.drop()

    def drop(self) -> None:
        self._body = b""
        if self._share is not None:
            self._share.close()
            self._share = None


def accepted(scope: Scope) -> Accepted:
    request: Accepted = scope["state"]["accepted"]
    return request


class Bodies:
    def __init__(self, app: ASGIApp, max_bytes: int, service: Service) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._service = service
        self._medium, self._large = Room(MAX_MEDIUM_HELD * MEDIUM_BYTES), Room(MAX_HELD * max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        try:
            self._check(headers)
            if scope["method"] == "POST":
                model = self._service.ready_model()
                with self._service.answering():
                    await self._accept(scope, receive, send, model)
                return
        except HTTPException as refusal:
            await self._refuse(receive, send, refusal)
            return
        await self._app(scope, receive, send)

    def _check(self, headers: Mapping[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if int(length) > self._max_bytes:
            raise self._too_large(length.decode())
        if length == b"0" and b"transfer-encoding" not in headers:
            return
        if not _is_json(headers.get(b"content-type", b"")):
            raise _refusal(415, "Send the header Content-Type: application/json.")
        encoding = _encoding(headers)
        if encoding != b"identity" and encoding not in ENCODINGS:
            shown = ascii(encoding[:64].decode("latin-1"))
            message = f"Bodies in the encoding {shown} can't be read. Send gzip, deflate, or no Content-Encoding."
            raise _refusal(415, message)

    async def _accept(self, scope: Scope, receive: Receive, send: Send, model: ServedModel) -> None:
        read = await self._read(receive, dict(scope["headers"]))
        if read is None:
            return  # the client is gone
        request = scope["state"]["accepted"] = Accepted(model, *read)
        del read
        is_gone = asyncio.Event()
        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:
            await _until_gone(receive)
            is_gone.set()
            task.cancel()

        async def received() -> Message:
            await is_gone.wait()
            return {"type": "http.disconnect"}

        watcher = asyncio.create_task(watch())
        try:
            await self._app(scope, received, send)
        except asyncio.CancelledError:
            if not is_gone.is_set():
                raise
            task.uncancel()
        finally:
            watcher.cancel()
            request.drop()

    async def _read(self, receive: Receive, headers: Mapping[bytes, bytes]) -> tuple[bytes, Share | None] | None:
        """The whole body, decoded, with its share of a room; None when the client went away before its end."""
        length, encoding = headers.get(b"content-length"), _encoding(headers)
        share = await self._share(int(length)) if length is not None else None
        pieces, num_bytes, has_more = [], 0, True
        try:
            async with asyncio.timeout(None) as arrival:
                while has_more:
                    if share is None and num_bytes > SMALL_BYTES:
                        share = await self._share(self._max_bytes)
                    if share is not None:
                        share.arrival, share.num_arrived = arrival, num_bytes
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        if share is not None:
                            share.close()
                        return None
                    pieces.append(message.get("body", b""))
                    num_bytes += len(pieces[-1])
                    has_more = message.get("more_body", False)
                    if num_bytes > self._max_bytes:
                        raise self._too_large("more")
            body = b"".join(pieces)
            del pieces
            if encoding in ENCODINGS and body:
                if share is not None:
                    share.close()
                share = await self._share(self._max_bytes)
                body = await asyncio.to_thread(self._unpack, body, encoding)
            if share is not None:
                share.arrival = None
                share.shrink(len(body))
            return body, share
        except BaseException as error:
            if share is not None:
                share.close()
            if isinstance(error, TimeoutError):
                raise self._busy("This one arrived too slowly to be kept.") from None
            raise

    async def _share(self, num_bytes: int) -> Share | None:
        if num_bytes <= SMALL_BYTES:
            return None
        try:
            return await (self._medium if num_bytes <= MEDIUM_BYTES else self._large).share(num_bytes)
        except TimeoutError:
            raise self._busy("There was no room for this one.") from None

    def _unpack(self, body: bytes, encoding: bytes) -> bytes:
        try:
            unpacked = unpack(body, encoding, self._max_bytes)
        except Damaged:
            message = f"The body is damaged: it can't be unpacked as {encoding.decode()}, which Content-Encoding names."
            raise _refusal(400, message) from None
        if len(unpacked) > self._max_bytes:
            raise self._too_large("more")
        return unpacked

    def _too_large(self, size: str) -> HTTPException:
        limit = self._max_bytes
        message = f"The body has {size} bytes; the limit is {limit}, which --max-body-bytes sets."
        return _refusal(413, message, "request_too_large")

    def _busy(self, why: str) -> HTTPException:
        message = (
            f"Too many large requests at once. {why} Those that are being read may have {MAX_HELD} times "
            f"{self._max_bytes} bytes together, which --max-body-bytes sets."
        )
        return _refusal(503, message, "engine_busy", {"Retry-After": "1"})

    async def _refuse(self, receive: Receive, send: Send, refusal: HTTPException) -> None:
        assert isinstance(refusal.detail, Error)
        headers = [(name.lower().encode(), value.encode()) for name, value in (refusal.headers or {}).items()]
        headers.append((b"connection", b"close"))
        await send_error(send, refusal.status_code, refusal.detail, headers, is_last=False)
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while num_bytes < self._max_bytes:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body"):
                        break
        await send({"type": "http.response.body", "body": b""})


def _refusal(
    status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
) -> HTTPException:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return HTTPException(status, Error(message=message, type=kind, code=code), headers)


def _encoding(headers: Mapping[bytes, bytes]) -> bytes:
    return headers.get(b"content-encoding", b"identity").strip().lower()


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""Decoder: bodies that clients have compressed, unpacked as they arrive and never beyond the limit of a body.

Knows bytes and encodings (RFC 9110, section 8.4), not what a body means.
"""

import zlib

from fastapi import HTTPException
from starlette.types import Message, Receive

from octavo.server.http.errors import Error

__all__ = ["ENCODINGS", "Decoder"]

ENCODINGS = frozenset([b"gzip", b"x-gzip", b"deflate"])
GZIP, ZLIB, RAW = 31, 15, -15
"""What zlib calls the formats."""
ZLIB_METHOD = 0x8
"""In the low half of the first byte of what is in zlib's format; some clients send bare deflate instead."""


class Decoder:
    """A `receive` of unpacked messages. One byte more than the limit is unpacked at most, which shows that it is
    exceeded."""

    def __init__(self, receive: Receive, encoding: str, max_bytes: int) -> None:
        self._receive = receive
        self._encoding = encoding
        self._num_left = max_bytes + 1
        self._unpacker: zlib._Decompress | None = None

    async def __call__(self) -> Message:
        """Raises HTTPException for a body that is damaged or ends too early."""
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        try:
            body = self._unpack(message.get("body", b""))
        except zlib.error:
            raise self._damaged() from None
        is_last = not message.get("more_body")
        if is_last and self._unpacker is not None and not self._unpacker.eof and self._num_left:
            raise self._damaged()
        return {**message, "body": body}

    def _unpack(self, data: bytes) -> bytes:
        parts = []
        while data and self._num_left:
            if self._unpacker is None or self._unpacker.eof:  # gzip may have several members
                self._unpacker = zlib.decompressobj(self._format(data[0]))
            parts.append(self._unpacker.decompress(data, self._num_left))
            self._num_left -= len(parts[-1])
            data = self._unpacker.unused_data
        return b"".join(parts)

    def _format(self, first: int) -> int:
        if self._encoding != "deflate":
            return GZIP
        return ZLIB if first & 0xF == ZLIB_METHOD else RAW

    def _damaged(self) -> HTTPException:
        message = f"The body is damaged: it can't be unpacked as {self._encoding}, which Content-Encoding names."
        return HTTPException(400, Error(message=message, type="invalid_request_error"), {"Connection": "close"})

"""Bodies that clients have compressed, unpacked within the limit of a body (RFC 9110, section 8.4)."""

import zlib

__all__ = ["ENCODINGS", "Damaged", "unpack"]

ENCODINGS = frozenset([b"gzip", b"x-gzip", b"deflate"])
GZIP, ZLIB, RAW = 31, 15, -15
"""What zlib calls the formats."""
ZLIB_METHOD = 0x8
"""In the low half of the first byte of what is in zlib's format; some clients send bare deflate instead."""
MAX_MEMBERS = 1000


class Damaged(Exception):
    """The body is not what its encoding says, or ends too early."""


def unpack(body: bytes, encoding: bytes, max_bytes: int) -> bytes:
    """At most one byte more than `max_bytes`, which shows that there is more. Lets other threads run meanwhile."""
    parts: list[bytes] = []
    num_left = max_bytes + 1
    try:
        while body and num_left:
            unpacker = zlib.decompressobj(_format(encoding, body[0]))
            parts.append(unpacker.decompress(body, num_left))
            num_left -= len(parts[-1])
            body = unpacker.unused_data  # gzip may have several members
            if (num_left and not unpacker.eof) or len(parts) > MAX_MEMBERS:
                raise Damaged
    except zlib.error:
        raise Damaged from None
    return b"".join(parts)


def _format(encoding: bytes, first: int) -> int:
    if encoding != b"deflate":
        return GZIP
    return ZLIB if first & 0xF == ZLIB_METHOD else RAW

"""Compressed bodies of requests: gzip and deflate are decoded, within the limits for bodies; others are refused.

Decoded bytes count as memory of the request before it takes any: a body of 58 KB may grow to 60 MB.
"""

from __future__ import annotations

import asyncio
import io
import zlib
from concurrent.futures import ThreadPoolExecutor

from frontend.http.held_bytes import SMALL_BODY, HeldBytes
from lmi_server.contract.errors import BadParameterError, PayloadTooLargeError, UnsupportedEncodingError
from lmi_server.contract.texts.quoting import excerpt

_GZIP = 16 + zlib.MAX_WBITS
_ZLIB = zlib.MAX_WBITS
_RAW_DEFLATE = -zlib.MAX_WBITS
_MAX_CODINGS = 2  # each may grow to the whole limit
_THREADS = ThreadPoolExecutor(2, "decode")  # not the ones for files and other machines
_LONG_BODY = 32 * 1024  # bytes that take too long for other requests to wait
_READ = 64 * 1024  # encoded bytes at a time: zlib copies what it leaves of them
_PIECE = 256 * 1024  # decoded bytes that are copied at a time
_STEP = 4 << 20  # decoded bytes at a time, between which the memory for them is reserved


async def decoded_body(body: bytes, properties: dict[str, str], limit: int, held: HeldBytes) -> bytes:
    """Return the body without its Content-Encoding, which is taken out of `properties`.

    `held` counts the body, and then the decoded one. Raises UnsupportedEncodingError for another encoding than gzip and
    deflate, BadParameterError if the body is not encoded so, PayloadTooLargeError if it is longer than `limit` bytes
    when it is decoded, and NoRoomError if bodies take all the memory that they may take.
    """
    encoding = properties.pop("content-encoding")
    codings = [name for part in encoding.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if len(codings) > _MAX_CODINGS or not {"gzip", "x-gzip", "deflate"}.issuperset(codings):
        raise UnsupportedEncodingError(
            f"Content-Encoding: {excerpt(encoding)} is not supported; send gzip, deflate or no Content-Encoding"
        )
    for coding in reversed(codings if body else []):
        decoded = await _decode(_Decoding(coding, body, limit), held)
        held.add(-len(body))
        body = decoded
    properties["content-length"] = str(len(body))
    return body


async def _decode(decoding: _Decoding, held: HeldBytes) -> bytes:
    """Return the decoded body. A short body that grows little is decoded at once, and any other one in a thread."""
    is_long = held.size > _LONG_BODY
    size = _STEP if is_long else SMALL_BODY - held.size
    while True:
        before = decoding.size
        size = min(size, decoding.left)
        held.reserve(size)
        if is_long:
            await asyncio.get_running_loop().run_in_executor(_THREADS, decoding.go_on, size)
        else:
            decoding.go_on(size)
        held.add(decoding.size - before - size)
        if decoding.has_ended:
            return decoding.result()
        size, is_long = _STEP, True


class _Decoding:
    """One body that is decoded in steps. `size` is what has been decoded so far."""

    def __init__(self, coding: str, body: bytes, limit: int) -> None:
        self._coding = coding
        self._rest = memoryview(body)
        self._limit = limit
        format_ = _GZIP if coding != "deflate" else _ZLIB if _has_zlib_header(body) else _RAW_DEFLATE
        self._decoder = zlib.decompressobj(format_)
        self._decoded = io.BytesIO()  # which gives its bytes away without a copy
        self._tail = b""  # what the decoder has left of what it was given

    @property
    def size(self) -> int:
        return self._decoded.tell()

    @property
    def left(self) -> int:
        """Return how many more bytes the limit allows, and the one by which a longer body is known."""
        return self._limit + 1 - self.size

    @property
    def has_ended(self) -> bool:
        return self._decoder.eof

    def go_on(self, size: int) -> None:
        """Decode up to `size` more bytes. Raises BadParameterError and PayloadTooLargeError."""
        end = self.size + size
        while not self._decoder.eof and self.size < end:
            encoded = self._tail or self._next()
            data = self._decompress(encoded, min(_PIECE, end - self.size))
            self._decoded.write(data)
            if self.size > self._limit:
                raise PayloadTooLargeError(
                    f"the decoded body is longer than max_request_size={self._limit} bytes; send less, or raise it"
                )
            if not encoded and not data and not self._decoder.eof:
                raise self._invalid("it is cut")
            self._tail = self._decoder.unconsumed_tail

    def result(self) -> bytes:
        """Return the whole. Raises BadParameterError if something follows it."""
        if self._decoder.unused_data or self._rest:
            raise self._invalid("it goes on after its end")
        return self._decoded.getvalue()

    def _next(self) -> memoryview:
        encoded, self._rest = self._rest[:_READ], self._rest[_READ:]
        return encoded

    def _decompress(self, encoded: bytes | memoryview, size: int) -> bytes:
        try:
            return self._decoder.decompress(encoded, size)
        except zlib.error as error:
            raise self._invalid(str(error)) from error

    def _invalid(self, reason: str) -> BadParameterError:
        return BadParameterError(f"the body is not valid {self._coding}: {reason}")


def _has_zlib_header(body: bytes) -> bool:
    """Return whether `deflate` means zlib's format, as RFC 9110 has it; some clients leave its header out."""
    return len(body) > 1 and body[0] % 16 == 8 and int.from_bytes(body[:2], "big") % 31 == 0

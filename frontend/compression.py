"""Compressed bodies of requests: gzip and deflate are decoded, within the limit for bodies; others are refused."""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor

from lmi_server.contract.errors import BadParameterError, PayloadTooLargeError, UnsupportedEncodingError

_GZIP = 16 + zlib.MAX_WBITS
_ZLIB = zlib.MAX_WBITS
_RAW_DEFLATE = -zlib.MAX_WBITS
_MAX_CODINGS = 2  # each may grow to the whole limit
_THREADS = ThreadPoolExecutor(2, "decode")  # not those that files and other machines may hold
_LONG_BODY = 32 * 1024  # bytes that take so long that other requests should not wait for it


async def decoded_body(body: bytes, properties: dict[str, str], limit: int) -> bytes:
    """Return the body without its Content-Encoding, which is taken out of `properties`.

    Raises UnsupportedEncodingError for another encoding than gzip and deflate, BadParameterError if the body is not
    encoded so, and PayloadTooLargeError if it is longer than `limit` bytes when it is decoded.
    """
    encoding = properties.pop("content-encoding")
    codings = [name for part in encoding.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if len(codings) > _MAX_CODINGS or not {"gzip", "x-gzip", "deflate"}.issuperset(codings):
        raise UnsupportedEncodingError(
            f"Content-Encoding: {encoding[:60]} is not supported; send gzip, deflate or no Content-Encoding"
        )
    for coding in reversed(codings if body else []):
        if len(body) > _LONG_BODY:
            body = await asyncio.get_running_loop().run_in_executor(_THREADS, _decoded, coding, body, limit)
        else:
            body = _decoded(coding, body, limit)
    properties["content-length"] = str(len(body))
    return body


def _decoded(coding: str, body: bytes, limit: int) -> bytes:
    decoder = zlib.decompressobj(_GZIP if coding != "deflate" else _ZLIB if _has_zlib_header(body) else _RAW_DEFLATE)
    try:
        data = decoder.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadParameterError(f"the body is not valid {coding}: {error}") from error
    if len(data) > limit:
        raise PayloadTooLargeError(f"the decoded body is longer than max_request_size={limit} bytes")
    if not decoder.eof:
        raise BadParameterError(f"the body is not valid {coding}: it is cut")
    if decoder.unused_data:
        raise BadParameterError(f"the body is not valid {coding}: it goes on after its end")
    return data


def _has_zlib_header(body: bytes) -> bool:
    """Return whether `deflate` means zlib's format, as RFC 9110 has it; some clients leave its header out."""
    return len(body) > 1 and body[0] % 16 == 8 and int.from_bytes(body[:2], "big") % 31 == 0

"""Bodies of requests with a Content-Encoding."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest

from frontend.http.compression import decoded_body
from frontend.http.held_bytes import HeldBytes, MemoryBudget
from lmi_server.contract.errors import (
    BadParameterError,
    LmiServerError,
    PayloadTooLargeError,
    UnsupportedEncodingError,
)

TEXT = b'{"inputs": "a b"}' * 10
DEFLATED = zlib.compress(TEXT)
RAW = DEFLATED[2:-4]


def gzipped(data: bytes) -> bytes:
    """Compress without the time, which would be in the name of a test: each process must collect the same names."""
    return gzip.compress(data, mtime=0)


def decoded(encoding: str, body: bytes, limit: int = 1000) -> tuple[bytes, dict[str, str]]:
    properties = {"content-encoding": encoding, "content-length": str(len(body))}
    held = HeldBytes(MemoryBudget(1 << 20, "full"))
    held.add(len(body))
    found = asyncio.run(decoded_body(body, properties, limit, held))
    assert held.size == len(found), "what is held is what was decoded"
    return found, properties


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzipped(TEXT)),
        ("X-Gzip", gzipped(TEXT)),
        ("deflate", DEFLATED),
        ("deflate", RAW),
        ("identity", TEXT),
        ("", TEXT),
        ("deflate, identity, gzip", gzipped(DEFLATED)),
    ],
)
def test_encodings(encoding: str, body: bytes) -> None:
    assert decoded(encoding, body) == (TEXT, {"content-length": "170"})


def test_no_body_is_no_body_in_any_encoding() -> None:
    assert decoded("gzip", b"")[0] == b""


def test_a_long_body_is_decoded_too() -> None:
    text = bytes(range(256)) * 1000
    assert decoded("gzip", gzipped(text), 256_000)[0] == text


@pytest.mark.parametrize(
    ("encoding", "body", "error", "reason"),
    [
        ("br", TEXT, UnsupportedEncodingError, "Content-Encoding: br is not supported; send gzip, deflate"),
        ("gzip, gzip, gzip", TEXT, UnsupportedEncodingError, "not supported"),
        ("gzip", TEXT, BadParameterError, "not valid gzip: Error -3"),
        ("deflate", gzipped(TEXT), BadParameterError, "not valid deflate"),
        ("gzip", gzipped(TEXT)[:-9], BadParameterError, "it is cut"),
        ("gzip", gzipped(TEXT) + b"x", BadParameterError, "it goes on after its end"),
        ("gzip", gzipped(b"x" * 1001), PayloadTooLargeError, "longer than max_request_size=1000"),
        ("deflate, gzip", gzipped(b""), BadParameterError, "not valid deflate: it is cut"),
    ],
)
def test_what_is_refused(encoding: str, body: bytes, error: type[LmiServerError], reason: str) -> None:
    with pytest.raises(error, match=reason):
        decoded(encoding, body)

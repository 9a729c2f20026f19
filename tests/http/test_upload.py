"""Forms with a file, in pieces of any size."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import httpx
import pytest

from frontend.batches.upload import Upload, read_upload
from lmi_server.contract.errors import BadParameterError

BOUNDARY = "bound"
Read = tuple[Upload, bytes]


async def _stream(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def read(
    pieces: Sequence[bytes], content_type: str = f"multipart/form-data; boundary={BOUNDARY}"
) -> tuple[Upload, bytes]:
    written: list[bytes] = []

    async def write(data: bytes) -> None:
        written.append(data)

    upload = asyncio.run(read_upload(content_type, _stream(pieces), write))
    return upload, b"".join(written)


def form(*parts: tuple[str, bytes]) -> bytes:
    heads = [f"--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() for head, _ in parts]
    body = b"".join(head + data + b"\r\n" for head, (_, data) in zip(heads, parts, strict=True))
    return body + f"--{BOUNDARY}--\r\n".encode()


def cut(data: bytes, seed: int) -> list[bytes]:
    places = sorted(random.Random(seed).choices(range(len(data) + 1), k=3 + seed % 20))
    return [data[start:end] for start, end in pairwise([0, *places, len(data)])]


@pytest.mark.parametrize("seed", range(30))
def test_a_file_is_read_whatever_is_in_it(seed: int) -> None:
    """Its content looks much like a delimiter, and comes in pieces."""
    values = random.Random(seed)
    looks = [b"\r\n--boun", b"\r\n", b"--bound", b"\r\n--bounx", b"-", b"\r", b"\n\r\n--", values.randbytes(50)]
    content = b"".join(values.choices(looks, k=20))
    while b"\r\n--bound" in content:  # a client chooses a boundary that is not in its file
        content = content.replace(b"\r\n--bound", b"")
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="a.jsonl"', content), ('name="later"', b"x"))
    upload, written = read(cut(body, seed))
    assert (upload.filename, written) == ("a.jsonl", content)
    assert upload.fields == {"purpose": "batch", "later": "x"}


def test_a_long_file_is_written_in_blocks() -> None:
    content = random.Random(0).randbytes(3_000_000)
    body = form(('name="file"', content))
    pieces = [body[start : start + 65536] for start in range(0, len(body), 65536)]
    upload, written = read(pieces)
    assert (upload.filename, written == content) == ("file", True)


@pytest.mark.parametrize("name", ["a b.txt", 'quo"te', "../../x", "é", "a;filename=b"])
def test_names_as_a_client_writes_them(name: str) -> None:
    request = httpx.Request("POST", "http://x", files={"file": (name, b"data")}, data={"purpose": "batch"})
    upload, written = read([request.read()], request.headers["content-type"])
    assert (upload.fields, written) == ({"purpose": "batch"}, b"data")
    assert upload.filename


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x" * 100_000,
        b"--bound",
        b"--boundx",
        b"--bound\r\n\r\n",
        form(("nothing", b"x")),
        form(('name="purpose"', b"batch")),
        form(('name="purpose"', b"b" * 9000), ('name="file"', b"")),
        form(*[('name="x"', b"")] * 30),
        form(('name="file"', b"x"), ('name="file"', b"x")),
        form(('name="file"', b"x"))[:-8],
        b"--bound\r\n" + b"header: x\r\n" * 5000,
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(BadParameterError):
        read([body[start : start + 7] for start in range(0, min(len(body), 20_000), 7)])


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_other_types_are_refused(content_type: str) -> None:
    with pytest.raises(BadParameterError, match="multipart/form-data"):
        read([b""], content_type)

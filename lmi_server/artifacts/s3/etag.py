"""Compares a file with an S3 object by size and ETag.

The ETag of an object that was uploaded in one piece is the MD5 of its bytes. The ETag of a multipart upload is the MD5
of the MD5s of its parts, and the number of parts. S3 does not list the size of the parts, but the common tools use only
few sizes, which can be tried. If an object is encrypted with a key of KMS or of the customer, its ETag is no digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import BinaryIO

_MIB = 1 << 20
# Defaults of the common tools: SDKs and the AWS command line 8 and 5, s5cmd 50, others powers of two.
_PART_SIZES = [size * _MIB for size in (5, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 200, 250, 256, 500, 512, 1024)]
_ETAG = re.compile(r"([0-9a-f]{32})(?:-([0-9]+))?")
_BLOCK = 1 << 20


class Verdict(Enum):
    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"
    """The sizes are equal, and the ETag cannot be compared."""


def compare(path: Path, size: int, etag: str) -> Verdict:
    """Compare the file at `path` with an object of `size` bytes with this `etag` (without its quotes)."""
    if not path.is_file() or path.stat().st_size != size:
        return Verdict.DIFFERENT
    if size == 0:
        return Verdict.SAME
    found = _ETAG.fullmatch(etag)
    if found is None:
        return Verdict.UNKNOWN
    if found[2] is None:
        return Verdict.SAME if md5(path) == etag else Verdict.DIFFERENT
    parts = int(found[2])
    if any(multipart_etag(path, part_size) == etag for part_size in part_sizes(size, parts)):
        return Verdict.SAME
    return Verdict.DIFFERENT if parts == 1 else Verdict.UNKNOWN


def part_sizes(size: int, parts: int) -> Iterator[int]:
    """Yield likely part sizes in bytes with which an upload of `size` bytes has `parts` parts."""
    if parts < 1:
        return
    even = -(-size // parts)  # rounded up
    candidates = [*_PART_SIZES, -(-even // _MIB) * _MIB, even]
    yield from (part for part in dict.fromkeys(candidates) if part > 0 and max(1, -(-size // part)) == parts)


def multipart_etag(path: Path, part_size: int) -> str:
    """Return the ETag of the file at `path` if it is uploaded in parts of `part_size` bytes."""
    digests = []
    with path.open("rb") as file:
        while digest := _digest_of_part(file, part_size):
            digests.append(digest)
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _digest_of_part(file: BinaryIO, part_size: int) -> bytes:
    """Return the MD5 of the next part; empty at the end of the file."""
    digest = hashlib.md5(usedforsecurity=False)
    left = part_size
    while left and (block := file.read(min(left, _BLOCK))):
        digest.update(block)
        left -= len(block)
    return digest.digest() if left < part_size else b""

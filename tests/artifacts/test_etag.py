from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.artifacts.s3.etag import Verdict, compare, multipart_etag, part_sizes

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4 * 1024 * 6)  # 6 MiB
    return path


def test_the_digest_decides(file: Path) -> None:
    digest = hashlib.md5(file.read_bytes()).hexdigest()
    assert compare(file, 6 * MIB, digest) is Verdict.SAME
    assert compare(file, 6 * MIB, "0" * 32) is Verdict.DIFFERENT
    assert compare(file, 6 * MIB - 1, digest) is Verdict.DIFFERENT
    assert compare(file.parent / "missing", 0, digest) is Verdict.DIFFERENT
    assert compare(file, 6 * MIB, "whatever") is Verdict.UNKNOWN


@pytest.mark.parametrize("part_size", [5 * MIB, 8 * MIB, 3 * MIB])
def test_the_digests_of_parts_decide_if_the_part_size_is_known(file: Path, part_size: int) -> None:
    assert compare(file, 6 * MIB, multipart_etag(file, part_size)) is Verdict.SAME


def test_an_unknown_part_size_decides_nothing(file: Path) -> None:
    assert compare(file, 6 * MIB, multipart_etag(file, 5_500_000)) is Verdict.UNKNOWN
    assert compare(file, 6 * MIB, f"{'0' * 32}-1") is Verdict.DIFFERENT, "one part is the whole file"
    assert compare(file, 6 * MIB, f"{'0' * 32}-0") is Verdict.UNKNOWN


def test_multipart_etag_is_that_of_s3() -> None:
    """As S3 computes it: the digest of the digests, and how many there were."""
    path = Path(__file__)
    content = path.read_bytes()
    parts = [content[start : start + 100] for start in range(0, len(content), 100)]
    digests = b"".join(hashlib.md5(part).digest() for part in parts)
    assert multipart_etag(path, 100) == f"{hashlib.md5(digests).hexdigest()}-{len(parts)}"


@given(st.integers(1, 1 << 42), st.integers(0, 10_000))
def test_part_sizes_make_that_many_parts(size: int, parts: int) -> None:
    for part_size in part_sizes(size, parts):
        assert -(-size // part_size) == parts

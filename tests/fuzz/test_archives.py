"""No sequence of entries of an archive, and no bytes, change anything outside of the directory it is unpacked to."""

from __future__ import annotations

import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fuzzing import budget
from hostile_archives import (
    DIRECTORY,
    FIFO,
    GLOBAL_PAX,
    HARD_LINK,
    LONG_LINK,
    LONG_NAME,
    OLD_SPARSE,
    PAX,
    SYMBOLIC_LINK,
    Packed,
    entry,
    extended,
    header,
    link,
    long_name,
    record,
    signed,
    tar_of,
    zip_of,
)
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.artifacts.unpacking.limits import ArchiveLimits
from lmi_server.artifacts.unpacking.unpack import unpack
from lmi_server.contract.errors import ArtifactError

LIMITS = ArchiveLimits(entries=50, size=1 << 20)
# Few parts, so that entries meet at every depth.
PARTS = st.lists(st.sampled_from([b"a", b"b", b"A"]), min_size=1, max_size=4).map(b"/".join)
ODD = st.sampled_from([b"", b".", b"..", b"/", b"../a", b"a/..", b"./a//b/.", b"a/", b"/a", b"\xff", b"a\\b", b"\n"])
NAMES = PARTS | PARTS | PARTS | ODD
UPWARDS = st.builds(lambda steps, rest: b"../" * steps + rest, st.integers(0, 4), PARTS | st.just(b""))
TARGETS = UPWARDS | UPWARDS | NAMES
CONTENTS = st.binary(max_size=20)
FILES = st.builds(entry, NAMES, CONTENTS)
LINKS = st.builds(link, NAMES, TARGETS, st.sampled_from([SYMBOLIC_LINK, HARD_LINK]))
HARD_LINKS = st.builds(link, NAMES, PARTS, st.just(HARD_LINK))
OTHERS = st.builds(entry, NAMES, st.just(b""), st.sampled_from([DIRECTORY, DIRECTORY, FIFO, b"3", b"Z"]))
KINDS = st.sampled_from([LONG_NAME, LONG_LINK, OLD_SPARSE, PAX, GLOBAL_PAX, *(b"%d" % kind for kind in range(8))])
RECORDS = st.builds(
    record,
    st.sampled_from([b"path", b"linkpath", b"size", b"GNU.sparse.map", b"GNU.sparse.size", b"GNU.sparse.name"]),
    TARGETS | st.integers(-5, 1 << 40).map(lambda number: b"%d" % number) | st.just(b"0,1,5,2"),
)
BEFORE = st.one_of(
    st.builds(extended, st.lists(RECORDS, max_size=3).map(b"".join) | CONTENTS, st.sampled_from([PAX, GLOBAL_PAX])),
    st.builds(long_name, TARGETS, st.sampled_from([LONG_NAME, LONG_LINK])),
)
ENTRIES = st.lists(st.one_of(FILES, FILES, LINKS, HARD_LINKS, OTHERS, BEFORE), max_size=9)
PACKED = st.builds(
    Packed,
    NAMES,
    CONTENTS,
    mode=st.sampled_from([0, stat.S_IFREG | 0o4777, stat.S_IFDIR, stat.S_IFLNK | 0o777, stat.S_IFIFO]),
    flags=st.sampled_from([0, 0, 0, 1, 0x800]),
    method=st.sampled_from([0, 0, 8, 12, 14, 77]),
    size=st.none() | st.integers(0, 40),
)


@contextmanager
def place() -> Iterator[Path]:
    """Yield an empty directory deep between others that hold a file under each name that an archive may lead to."""
    with tempfile.TemporaryDirectory() as root:
        target = Path(root, "1", "2", "3", "target")
        target.mkdir(parents=True)
        for directory in list(target.parents)[:4]:
            (directory / "a").mkdir()
            (directory / "a" / "b").write_bytes(b"canary")
            (directory / "b").write_bytes(b"canary")
        yield target


def state_outside(target: Path) -> Mapping[str, tuple[object, ...]]:
    """Return what can be seen of everything around the target: kinds, modes, owners of names, sizes and times."""
    found = {}
    for path in target.parents[3].rglob("*"):
        if not path.is_relative_to(target):
            state = path.lstat()
            found[str(path)] = (state.st_mode, state.st_ino, state.st_nlink, state.st_size, state.st_mtime_ns)
    return found


def check_inside(target: Path, *, complete: bool) -> None:
    """Every file has all its names inside; if the archive was accepted, so does every link lead inside."""
    names: Counter[int] = Counter()
    links: dict[int, int] = {}
    for path in target.rglob("*"):
        state = path.lstat()
        if stat.S_ISREG(state.st_mode):
            names[state.st_ino] += 1
            links[state.st_ino] = state.st_nlink
            assert state.st_mode & 0o7022 == 0
        elif stat.S_ISLNK(state.st_mode):
            assert state.st_nlink == 1, "a link with a second name leads elsewhere from there"
            assert not complete or leads_to(path).is_relative_to(os.path.realpath(target))
        else:
            assert stat.S_ISDIR(state.st_mode)
    assert links == names


def leads_to(link: Path) -> Path:
    """Return where a link leads to; of a loop, and of a link to nothing, where its text does."""
    try:
        return Path(os.path.realpath(link, strict=True))
    except OSError:
        return Path(os.path.normpath(os.path.join(os.path.realpath(link.parent), os.readlink(link))))


def check(name: str, content: bytes) -> None:
    with place() as target:
        archive = target.parent / name
        archive.write_bytes(content)
        before = state_outside(target)
        refusal: ArtifactError | None = None
        try:
            unpack(archive, target, LIMITS, lambda done: None)
        except ArtifactError as error:
            refusal = error
        assert refusal is None or refusal.message.isprintable()
        check_inside(target, complete=refusal is None)
        assert state_outside(target) == before


@budget(250)
@given(ENTRIES)
def test_a_tar_writes_inside(entries: list[bytes]) -> None:
    check("model.tar", tar_of(*entries))


@budget(100)
@given(st.lists(PACKED, max_size=6))
def test_a_zip_writes_inside(entries: list[Packed]) -> None:
    check("model.zip", zip_of(*entries))


@budget(100)
@given(NAMES, KINDS, CONTENTS, st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=4), ENTRIES)
def test_any_header_is_an_entry_or_an_error(
    name: bytes, kind: bytes, content: bytes, changes: list[tuple[int, int]], entries: list[bytes]
) -> None:
    block = header(name, kind, size=len(content))
    for position, value in changes:
        block[position] = value
    check("model.tar", tar_of(entry(b"a/b", b"x"), bytes(signed(block)), content.ljust(512, b"\0"), *entries))


@budget(100)
@given(st.lists(PACKED, min_size=1, max_size=3), st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4))
def test_any_bytes_of_a_zip_are_entries_or_an_error(entries: list[Packed], changes: list[tuple[int, int]]) -> None:
    content = bytearray(zip_of(*entries))
    for position, value in changes:
        content[position % len(content)] = value
    check("model.zip", bytes(content))


@budget(60)
@given(st.binary(max_size=2000), st.sampled_from(["model.tar", "model.zip", "model.tar.gz"]))
def test_any_bytes_are_an_archive_or_an_error(content: bytes, name: str) -> None:
    for magic in (b"", b"\x1f\x8b\x08", b"BZh9", b"\xfd7zXZ\0", b"\x5d\0\0\x01"):
        check(name, magic + content)

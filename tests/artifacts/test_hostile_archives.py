"""Archives that were made to do harm: each is refused with a reason, and nothing outside of its target changes."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import struct
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from hostile_archives import (
    DIRECTORY,
    FIFO,
    GLOBAL_PAX,
    LONG_LINK,
    Packed,
    deflated,
    end_of_zip,
    entry,
    extended,
    hard_link,
    header,
    link,
    long_name,
    old_sparse,
    record,
    tar_of,
    zip_of,
)

from lmi_server.artifacts.archive import extract_archive
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.unpacking.limits import ArchiveLimits
from lmi_server.contract.errors import ArtifactError

MIB = 1 << 20
# Less than what one header of the bombs takes, so that a header that is read whole ends the program.
LIMITS = ArchiveLimits(entries=1000, memory=64 * MIB)
HEADERS = "has headers of more than 256 KiB for one entry"


def moved_link(target: bytes) -> tuple[bytes, ...]:
    """A link that is allowed where it is made, and gets a second name nearer to the root, where it leads out."""
    deep = b"a/b/c/d/e"
    return (entry(deep), link(deep, target), hard_link(b"up", deep), entry(b"up/evil", b"x"))


def quine() -> bytes:
    """Many entries that share the bytes of one."""
    kernel = deflated(bytes(10 * MIB))
    shared = (Packed(b"%d" % index, bytes(10 * MIB), 0, 0, 8, kernel, place_of=0) for index in range(1, 90))
    return zip_of(Packed(b"0", bytes(10 * MIB), 0, 0, 8, kernel), *shared)


def large_directory() -> bytes:
    """A zip with a directory of 40 MiB."""
    central = b"".join(Packed(b"n" * 65_000).central(0) for _ in range(640))
    return central + end_of_zip(640, len(central), 0)


def many_records() -> bytes:
    central = Packed(b"n").central(0) * 200_000
    return central + end_of_zip(200_000, len(central), 0)


def nested_quadratic_records() -> bytes:
    return extended(b"2 " * 120_000 + b"=")


HOSTILE_TARS: Mapping[str, tuple[Callable[[], tuple[bytes, ...]], str]] = {
    "a hard link to a link that took a file's place": (
        lambda: moved_link(b"../../../../"),
        "entry 'up' is a link to a/b/c/d/e, which is no file before it",
    ),
    "the same, and the link leads to a file": (lambda: moved_link(b"../../../../evil"), "which is no file before it"),
    "a hard link to a directory": (
        lambda: (entry(b"d/", kind=DIRECTORY), hard_link(b"h", b"d")),
        "which is no file before it",
    ),
    "a hard link to the target itself": (lambda: (hard_link(b"h", b"."),), "which is no file before it"),
    "a hard link through a link": (
        lambda: (entry(b"d/f"), link(b"l", b"d"), hard_link(b"h", b"l/f")),
        "is a link to l/f, which is no file before it",
    ),
    "a directory through a link": (lambda: (link(b"l", b"d"), entry(b"l/", kind=DIRECTORY)), "leads through a link"),
    "a link in place of a directory": (
        lambda: (entry(b"d/f"), link(b"d", b"x")),
        "entry 'd' has the name of a directory before it",
    ),
    "a file in place of a directory": (lambda: (entry(b"d/f"), entry(b"d")), "has the name of a directory before it"),
    "a file below a file": (lambda: (entry(b"f"), entry(b"f/g")), "entry 'f/g' leads through a file"),
    "a directory in place of a file": (lambda: (entry(b"f"), entry(b"f/", kind=DIRECTORY)), "leads through a file"),
    "a link to nothing": (lambda: (link(b"l", b""),), "is a link out of the archive"),
    "a link that leads out through a longer name": (
        lambda: (long_name(b"../" * 60 + b"evil", LONG_LINK), link(b"l", b"")),
        "is a link out of the archive",
    ),
    "a link out, in an extended header": (
        lambda: (extended(record(b"linkpath", b"/etc")), link(b"l", b"x")),
        r"is a link out of the archive \(/etc\)",
    ),
    "a path out, in a global header": (
        lambda: (extended(record(b"path", b"../evil"), GLOBAL_PAX), entry(b"a")),
        "entry '../evil' leads out of the archive",
    ),
    "a pipe": (lambda: (entry(b"pipe", kind=FIFO),), "is a device or another special file"),
    "a kind that is not known": (lambda: (entry(b"x", kind=b"Z"),), "is a device or another special file"),
    "a control character in a refused name": (lambda: (entry(b"../\n\x1b[2J"),), r"entry '../\\n\\x1b\[2J' leads out"),
    "bytes that are no text in a refused name": (lambda: (entry(b"../\xff"),), r"entry '../\\udcff' leads out"),
    "a name of 200 KB": (
        lambda: (long_name(b"n" * 200_000), entry(b"x")),
        r"\(200000 characters\)' is longer than 2048 bytes",
    ),
    "a path of 1,000 directories": (
        lambda: (long_name(b"d/" * 1000 + b"f"), entry(b"x")),
        "is no path that can be written",
    ),
    "a name of 300 bytes": (lambda: (long_name(b"n" * 300), entry(b"x")), "is no path that can be written"),
    "directories that no entry names": (
        lambda: tuple(part for index in range(30) for part in (long_name(b"%d/" % index + b"d/" * 90), entry(b"x"))),
        "holds more than 1000 entries; it is refused as a bomb",
    ),
    "a long name of 80 MiB": (lambda: (long_name(b"n" * (80 * MIB)), entry(b"x")), HEADERS),
    "an extended header of 80 MiB": (lambda: (extended(record(b"k", b"v" * (80 * MIB))), entry(b"x")), HEADERS),
    "a global header of 80 MiB": (
        lambda: (extended(record(b"k", b"v" * (80 * MIB)), GLOBAL_PAX), entry(b"x")),
        HEADERS,
    ),
    "100,000 extended headers": (
        lambda: (extended(record(b"k", b"v")) * 100_000, entry(b"x")),
        "is refused|is damaged",
    ),
    "global headers without an end": (
        lambda: tuple(extended(record(b"%d" % index, b"v" * 100_000), GLOBAL_PAX) for index in range(800)),
        "is refused",
    ),
    "100,000 long names": (lambda: (long_name(b"n") * 100_000, entry(b"x")), "is refused|is damaged"),
    "a sparse file's map of 80 MiB": (lambda: (old_sparse(80 * MIB // 24),), HEADERS),
    "a number of 200,000 digits": (lambda: (extended(b"1" * 200_000), entry(b"x")), "number of more than 127 digits"),
    "records within records": (lambda: (nested_quadratic_records(), entry(b"x")), "is refused|is damaged"),
    "a size below 0": (lambda: (bytes(header(b"x", size=b"\xff" * 12)), entry(b"y")), "has a size below 0"),
    "a long name with a size below 0": (
        lambda: (bytes(header(b"x", b"L", size=b"\xff" * 12)), entry(b"y")),
        "is refused",
    ),
    "a size of 8 TiB": (
        lambda: (bytes(header(b"x", size=b"\x80" + bytes(4) + b"\x08" + bytes(6))),),
        "unpacks to more than",
    ),
    "a size in an extended header": (
        lambda: (extended(record(b"size", b"9" * 30)), entry(b"x")),
        "unpacks to more than 1.0 GiB; it is refused as a bomb",
    ),
    "a sparse file of 8 TiB": (
        lambda: (
            extended(record(b"GNU.sparse.size", b"8" + b"0" * 12) + record(b"GNU.sparse.map", b"0,1")),
            entry(b"x", b"x"),
        ),
        "unpacks to more than 1.0 GiB",
    ),
    "a header with a wrong checksum": (lambda: (entry(b"a"), b"garbage" + entry(b"b")[7:]), "is damaged"),
}


LARGE = ("80 MiB", "100,000", "bomb in", "share bytes")
"""What the names of cases have that take half a second of a processor."""


def cases_of(cases: Iterable[str]) -> list[object]:
    """Return the names of cases, the large ones marked as slow."""
    return [pytest.param(case, marks=pytest.mark.slow) if any(map(case.count, LARGE)) else case for case in cases]


def check_refused(archive: Path, reason: str, limits: ArchiveLimits = LIMITS) -> None:
    """Extract the archive between two files that must stay as they are; it must be refused."""
    place = archive.parent / "place"
    target = place / "partial" / "target"
    target.mkdir(parents=True)
    canaries = [archive.parent / "evil", place / "evil", place / "partial" / "evil"]
    for canary in canaries:
        canary.write_bytes(b"canary")
    with pytest.raises(ArtifactError, match=reason) as refused:
        extract_archive(archive, target, limits, Activity())
    message = str(refused.value).removeprefix(f"{archive}: ")
    assert message != str(refused.value), "it names the archive"
    assert message.isprintable()
    assert len(message) < 500
    assert {canary.read_bytes() for canary in canaries} == {b"canary"}
    outside = {path for path in archive.parent.rglob("*") if not path.is_relative_to(target)}
    assert outside == {archive, place, place / "partial", *canaries}


@pytest.mark.parametrize("case", cases_of(HOSTILE_TARS))
def test_a_hostile_tar_is_refused(tmp_path: Path, case: str) -> None:
    entries, reason = HOSTILE_TARS[case]
    archive = tmp_path / "model.tar.gz"
    archive.write_bytes(gzip.compress(tar_of(*entries()), 1))
    check_refused(archive, reason)


HOSTILE_ZIPS: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "a link": (lambda: zip_of(Packed(b"l", b"/etc", stat.S_IFLNK | 0o777)), "is a link or a special file"),
    "a pipe": (lambda: zip_of(Packed(b"p", b"", stat.S_IFIFO | 0o777)), "is a link or a special file"),
    "a path out": (lambda: zip_of(Packed(b"a/../../evil", b"x")), "'a/../../evil' leads out of the archive"),
    "an absolute path": (lambda: zip_of(Packed(b"/evil", b"x")), "'/evil' is an absolute path"),
    "a path of Windows": (lambda: zip_of(Packed(b"..\\evil", b"x")), "holds a backslash"),
    "an entry without a name": (lambda: zip_of(Packed(b"", b"x")), "has no name"),
    "a directory as a file": (lambda: zip_of(Packed(b"d/f"), Packed(b"d", b"x")), "has the name of a directory"),
    "a file as a directory": (lambda: zip_of(Packed(b"f", b"x"), Packed(b"f/g", b"x")), "leads through a file"),
    "an encrypted entry": (lambda: zip_of(Packed(b"x", b"secret", flags=1)), "is encrypted"),
    "a name of 60 KB": (lambda: zip_of(Packed(b"n" * 60_000)), "is longer than 2048 bytes"),
    "a path of 1,000 directories": (lambda: zip_of(Packed(b"d/" * 1000)), "is no path that can be written"),
    "a name that is no UTF-8": (lambda: zip_of(Packed(b"\xff", flags=0x800)), "is damaged"),
    "a method that is not known": (lambda: zip_of(Packed(b"x", b"x", method=77)), "is damaged"),
    "entries that share bytes": (quine, "entry '1' lies within the bytes of '0'"),
    "a directory of 40 MiB": (large_directory, "has a directory of more than 32 MiB"),
    "200,000 entries": (many_records, "holds more than 1000 entries"),
    "a size that is too small": (
        lambda: zip_of(Packed(b"x", bytes(MIB), 0, 0, 8, deflated(bytes(MIB)), size=10)),
        "is damaged",
    ),
    "a size that is too large": (lambda: zip_of(Packed(b"x", b"x", 0, 0, 8, deflated(b"x"), size=5)), "is damaged"),
    "a size of 4 GiB": (lambda: zip_of(Packed(b"x", b"x", size=0xFFFFFFFE)), "unpacks to more than"),
    "sizes of 64 bits that are not there": (lambda: zip_of(Packed(b"x", b"x", size=0xFFFFFFFF)), "is refused|damaged"),
    "a bomb in bzip2": (
        lambda: zip_of(Packed(b"x", b"", 0, 0, 12, bz2.compress(bytes(80 * MIB)), size=80 * MIB)),
        "needs more than 64.0 MiB of memory",
    ),
    "a directory that begins behind its end": (lambda: end_of_zip(1, 100, 0xFFFFFFF0), "is damaged"),
    "cut data": (lambda: zip_of(Packed(b"x", b"x" * 100))[50:], "is damaged"),
}


@pytest.mark.parametrize("case", cases_of(HOSTILE_ZIPS))
def test_a_hostile_zip_is_refused(tmp_path: Path, case: str) -> None:
    content, reason = HOSTILE_ZIPS[case]
    archive = tmp_path / "model.zip"
    archive.write_bytes(content())
    check_refused(archive, reason)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_bomb_is_refused_in_every_compression(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    archive = tmp_path / "model.tar.gz"
    archive.write_bytes(compress(tar_of(entry(b"zeros", bytes(24 * MIB)))))
    check_refused(archive, "unpacks to more than 20.0 MiB", ArchiveLimits(size=20 * MIB, memory=64 * MIB))


def test_a_dictionary_of_xz_that_is_too_large_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "model.tar"
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 16 * MIB}]
    archive.write_bytes(lzma.compress(tar_of(entry(b"a")), filters=filters))
    check_refused(archive, "needs more than 8.0 MiB of memory to be unpacked", ArchiveLimits(memory=8 * MIB))


@pytest.mark.slow
def test_the_processor_time_is_bounded(tmp_path: Path) -> None:
    archive = tmp_path / "model.tar"
    archive.write_bytes(tar_of(*(entry(b"%d/%d" % (index % 99, index)) for index in range(100_000))))
    limits = ArchiveLimits(size=MIB, seconds=1)
    check_refused(
        archive, "takes more than 1 seconds of processor time to be unpacked; it is refused as a bomb", limits
    )


def test_the_caller_holds_nothing_of_a_header(tmp_path: Path) -> None:
    archive = tmp_path / "model.tar"
    archive.write_bytes(tar_of(long_name(b"n" * (80 * MIB)), entry(b"x")))
    tracemalloc.start()
    try:
        check_refused(archive, HEADERS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB


@pytest.mark.parametrize("length", [1, 3, 10])
def test_a_tar_that_is_cut_within_a_header_is_refused(tmp_path: Path, length: int) -> None:
    archive = tmp_path / "model.tar"
    archive.write_bytes(entry(b"a", b"x") + entry(b"b", b"x")[:length])
    check_refused(archive, "is damaged")


# --- archives that are unusual, and sound ---


def extracted(archive: Path, content: bytes) -> dict[str, bytes]:
    """Return the files that an archive holds, by path."""
    archive.write_bytes(content)
    target = archive.parent / "target"
    target.mkdir()
    extract_archive(archive, target, ArchiveLimits(), Activity())
    files = [path for path in target.rglob("*") if path.is_file()]
    return {os.fsdecode(path.relative_to(target)): path.read_bytes() for path in files}


def inner_tar() -> bytes:
    return gzip.compress(tar_of(entry(b"inner")))


SOUND_TARS: Mapping[str, tuple[Callable[[], bytes], Mapping[str, bytes]]] = {
    "a nested archive stays one": (lambda: tar_of(entry(b"a.tar.gz", b"PK\1\2")), {"a.tar.gz": b"PK\1\2"}),
    "the last of two of a name": (lambda: tar_of(entry(b"a", b"1"), entry(b"./a", b"2")), {"a": b"2"}),
    "names that differ by case": (lambda: tar_of(entry(b"a", b"1"), entry(b"A", b"2")), {"a": b"1", "A": b"2"}),
    "a directory twice": (lambda: tar_of(entry(b"d/", kind=DIRECTORY) * 2, entry(b"d/f")), {"d/f": b""}),
    "empty parts and dots": (lambda: tar_of(entry(b".//a/.//b", b"1")), {"a/b": b"1"}),
    "names that are no UTF-8": (lambda: tar_of(entry(b"caf\xe9\n", b"1")), {"caf\udce9\n": b"1"}),
    "long names": (lambda: tar_of(long_name(b"d/" * 90 + b"n" * 200), entry(b"x")), {"d/" * 90 + "n" * 200: b""}),
    "no blocks of zeros at the end": (lambda: entry(b"a", b"1"), {"a": b"1"}),
    "members of gzip in a row": (
        lambda: gzip.compress(entry(b"a", b"1")) + gzip.compress(tar_of(entry(b"b", b"2"))),
        {"a": b"1", "b": b"2"},
    ),
    "a tar that ends with a zip": (lambda: tar_of(entry(b"a", b"1")) + zip_of(Packed(b"b", b"2")), {"a": b"1"}),
    "bzip2": (lambda: bz2.compress(tar_of(entry(b"a", b"1"))), {"a": b"1"}),
    "xz": (lambda: lzma.compress(tar_of(entry(b"a", b"1"))), {"a": b"1"}),
    "the older format of xz": (
        lambda: lzma.compress(tar_of(entry(b"a", b"1")), format=lzma.FORMAT_ALONE),
        {"a": b"1"},
    ),
    "a sparse file": (
        lambda: tar_of(
            extended(record(b"GNU.sparse.size", b"8") + record(b"GNU.sparse.map", b"2,1,6,2")), entry(b"x", b"123")
        ),
        {"x": b"\0\x001\0\0\x0023"},
    ),
}


@pytest.mark.parametrize("case", SOUND_TARS)
def test_an_unusual_tar_is_extracted(tmp_path: Path, case: str) -> None:
    content, files = SOUND_TARS[case]
    assert extracted(tmp_path / "model.tar.gz", content()) == files


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_of_each_method_is_extracted(tmp_path: Path, method: int) -> None:
    written = tmp_path / "written"
    with zipfile.ZipFile(written, "w", method) as packed:
        packed.writestr("a/b", b"x" * 3_000_000)
        packed.writestr("a/b.zip", b"PK")
        packed.comment = struct.pack("<I", 7) * 500
    files = {"a/b": b"x" * 3_000_000, "a/b.zip": b"PK"}
    assert extracted(tmp_path / "model.zip", b"a program in front" + written.read_bytes()) == files


@pytest.mark.parametrize("form", ["gnu", "oldgnu", "pax", "ustar", "v7"])
def test_a_tar_of_each_format_of_gnu_tar_is_extracted(tmp_path: Path, form: str) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    with (source / "sub" / "holes").open("wb") as holes:
        holes.write(b"begin")
        holes.seek(3 * MIB)
        holes.write(b"end")
    (source / "link").symlink_to("sub/holes")
    os.link(source / "sub" / "holes", source / "same")
    sparse = () if form in ("ustar", "v7") else ("--sparse",)
    subprocess.run(["tar", f"--format={form}", *sparse, "-cf", tmp_path / "t", "-C", source, "."], check=True)
    holes = b"begin" + bytes(3 * MIB - 5) + b"end"
    files = extracted(tmp_path / "model.tar", (tmp_path / "t").read_bytes())
    assert files == {"sub/holes": holes, "link": holes, "same": holes}

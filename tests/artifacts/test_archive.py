from __future__ import annotations

import io
import resource
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from artifact_helpers import Recorder

from lmi_server.artifacts.archive import content_root, extract_archive
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.unpacking.limits import ArchiveLimits
from lmi_server.contract.errors import ArtifactError

Entry = Callable[[tarfile.TarFile], None]


def file(name: str, content: bytes = b"x", mode: int = 0o644) -> Entry:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(content), mode
        tar.addfile(info, io.BytesIO(content))

    return add


def special(name: str, kind: bytes, target: str = "") -> Entry:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        tar.addfile(info)

    return add


def link(name: str, target: str) -> Entry:
    return special(name, tarfile.SYMTYPE, target)


def hard_link(name: str, target: str) -> Entry:
    return special(name, tarfile.LNKTYPE, target)


def write_tar(path: Path, *entries: Entry) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as tar:
        for add in entries:
            add(tar)
    return path


def extract(archive: Path, limits: ArchiveLimits | None = None, activity: Activity | None = None) -> Path:
    target = archive.parent / "nested" / "target"
    target.mkdir(parents=True)
    extract_archive(archive, target, limits or ArchiveLimits(), activity or Activity())
    return target


@pytest.mark.parametrize("suffix", ["tar.gz", "tgz", "tar", "mar"])
def test_a_tar_is_extracted_with_its_links(tmp_path: Path, suffix: str) -> None:
    archive = write_tar(
        tmp_path / f"model.{suffix}",
        *(file("./config.json", b"{}"), file("sub/weights", b"w" * 100)),
        *(link("sub/again", "weights"), link("up", "sub/weights"), link("sub/top", "../config.json")),
        hard_link("same", "sub/weights"),
    )
    target = extract(archive)
    assert (target / "config.json").read_bytes() == b"{}"
    for name in ("sub/weights", "sub/again", "up", "same"):
        assert (target / name).read_bytes() == b"w" * 100
    assert (target / "sub/top").read_bytes() == b"{}"


def test_modes_are_kept_without_what_others_may_write(tmp_path: Path) -> None:
    entries = [file("run", mode=0o4777), file("data", mode=0o200), file("plain", mode=0o644)]
    target = extract(write_tar(tmp_path / "model.tar", *entries))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()}
    assert modes == {"run": 0o755, "data": 0o600, "plain": 0o644}


def test_a_later_entry_replaces_an_earlier_one_and_not_its_links(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "model.tar", file("a", b"1"), hard_link("b", "a"), file("a", b"2"))
    target = extract(archive)
    assert ((target / "a").read_bytes(), (target / "b").read_bytes()) == (b"2", b"1")


@pytest.mark.parametrize("suffix", ["zip", "mar"])
def test_a_zip_is_extracted(tmp_path: Path, suffix: str) -> None:
    archive = tmp_path / f"model.{suffix}"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("empty/", "")
        packed.writestr("sub/config.json", "{}")
    target = extract(archive)
    assert (target / "sub" / "config.json").read_text() == "{}"
    assert (target / "empty").is_dir()


def test_progress_is_reported(tmp_path: Path) -> None:
    activity = Recorder()
    archive = write_tar(tmp_path / "model.tar", file("a", b"x" * (12 << 20)), file("b", b"x" * (4 << 20)))
    extract(archive, activity=activity)
    check_progress(activity, archive)


def test_progress_in_a_zip_is_reported(tmp_path: Path) -> None:
    activity = Recorder()
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as packed:
        packed.writestr("a", b"x" * (12 << 20))
        packed.writestr("b", b"x" * (4 << 20))
    extract(tmp_path / "model.zip", activity=activity)
    check_progress(activity, tmp_path / "model.zip")


def check_progress(activity: Recorder, archive: Path) -> None:
    """The share grows within a large file too, and ends at the whole."""
    assert {seen.what for seen in activity.seen} == {f"extracting {archive.name}"}
    size = archive.stat().st_size
    assert {seen.total for seen in activity.seen} == {size}
    done = [seen.done for seen in activity.seen]
    assert done == sorted(done)
    assert done[-1] == size
    assert len([each for each in done if size / 5 < each < size]) >= 3


@pytest.mark.slow
def test_a_cancelled_extraction_ends(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "model.tar", *(file(f"{index}") for index in range(20_000)))
    with pytest.raises(ArtifactError, match="the download was cancelled"):
        extract(archive, activity=Recorder(cancel_at="extracting"))
    (tmp_path / "nested" / "target").rename(tmp_path / "moved")
    assert len(list((tmp_path / "moved").iterdir())) < 20_000, "no program writes any more"


def test_an_archive_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.tar").mkdir()
    with pytest.raises(ArtifactError, match=r"model\.tar: cannot be read: Is a directory$"):
        extract(tmp_path / "model.tar")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """A limit of the size of files, which the program inherits, stands for the end of the disk."""
    archive = write_tar(tmp_path / "model.tar", file("weights", bytes(1 << 20)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(ArtifactError, match="target: the disk is full; make room"):
            extract(archive)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([file("../evil")], "'../evil' leads out of the archive"),
        ([file("a/../../evil")], "leads out of the archive"),
        ([file("/evil")], "'/evil' is an absolute path"),
        ([link("a", "/etc/passwd")], "is a link out of the archive"),
        ([link("a", "..")], "is a link out of the archive"),
        ([link("sub/a", "../../evil")], "is a link out of the archive"),
        ([link("a", "sub"), file("a/evil")], "leads through a link"),
        ([link("a", "b"), file("a")], "leads through a link"),
        ([link("a", "b"), link("a/c", "d")], "leads through a link"),
        ([link("x/y", ".."), link("z", "x/y/..")], "is a link out of the archive"),
        ([hard_link("a", "/etc/passwd")], "is an absolute path"),
        ([hard_link("a", "../x")], "leads out of the archive"),
        ([link("a", "b"), hard_link("c", "a")], "is a link to a, which is no file before it"),
        ([hard_link("a", "missing")], "is a link to missing, which is no file before it"),
        ([hard_link("a", "a")], "is a link to a, which is no file before it"),
        ([special("dev", tarfile.CHRTYPE)], "is a device or another special file"),
        ([special("disk", tarfile.BLKTYPE)], "is a device or another special file"),
        ([special("pipe", tarfile.FIFOTYPE)], "is a device or another special file"),
        ([file("a\\..\\b")], "holds a backslash"),
        ([link(".", "a")], "has no name"),
        ([file("b/..")], "leads out of the archive"),
    ],
)
def test_an_unsafe_tar_is_refused(tmp_path: Path, entries: list[Entry], reason: str) -> None:
    with pytest.raises(ArtifactError, match=reason):
        extract(write_tar(tmp_path / "model.tar", *entries))
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "nested" / "evil").exists()


def test_links_through_many_links_and_directories_take_bounded_time(tmp_path: Path) -> None:
    deep = "d/" * 98
    chain = [link(f"{deep}0", "file"), *(link(f"{deep}{n}", f"{'../' * 98}{deep}{n - 1}") for n in range(1, 38))]
    ends = [link(f"{deep}to{n}", "37") for n in range(300)]
    archive = write_tar(tmp_path / "model.tar", file(f"{deep}file"), *chain, *ends)
    target = extract(archive, ArchiveLimits(seconds=3, size=1 << 20))
    assert (target / deep / "to299").read_bytes() == b"x"


def test_an_entry_may_be_named_with_a_dot(tmp_path: Path) -> None:
    target = extract(write_tar(tmp_path / "model.tar", file("./a/.", b"1"), hard_link("b/.", "a/."), link("c/.", "b")))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {"a": b"1", "b": b"1", "c": b"1"}


@pytest.mark.parametrize(
    ("name", "mode", "reason"),
    [
        ("../evil", 0, "leads out of the archive"),
        ("/evil", 0, "is an absolute path"),
        ("link", stat.S_IFLNK | 0o777, "is a link or a special file"),
    ],
)
def test_an_unsafe_zip_is_refused(tmp_path: Path, name: str, mode: int, reason: str) -> None:
    archive = tmp_path / "model.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        packed.writestr(info, "x")
    with pytest.raises(ArtifactError, match=reason):
        extract(archive)


def test_a_bomb_of_bytes_is_refused(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "model.tar.gz", file("zeros", b"\0" * 2_000_000))
    with pytest.raises(ArtifactError, match=r"unpacks to more than 976\.6 KiB; it is refused as a bomb"):
        extract(archive, ArchiveLimits(size=1_000_000))
    assert ArchiveLimits().largest(20 << 20) == 2000 << 20, "100 times its size, for an archive of 20 MiB"


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "model.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("zeros", b"\0" * 2_000_000)
    with pytest.raises(ArtifactError, match="refused as a bomb"):
        extract(archive, ArchiveLimits(size=1_000_000))
    assert not (tmp_path / "nested" / "target" / "zeros").exists()


def test_a_bomb_of_entries_is_refused(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "model.tar", *(file(f"{index}") for index in range(11)))
    with pytest.raises(ArtifactError, match="holds more than 10 entries; it is refused as a bomb"):
        extract(archive, ArchiveLimits(entries=10))


@pytest.mark.parametrize("suffix", ["tar.gz", "tar", "zip", "mar"])
def test_what_is_no_archive_is_refused(tmp_path: Path, suffix: str) -> None:
    archive = tmp_path / f"model.{suffix}"
    archive.write_bytes(b"no archive at all" * 100)
    with pytest.raises(ArtifactError, match="is damaged, or is no tar or zip archive"):
        extract(archive)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "model.tar.gz", *(file(f"{index}", bytes(range(256)) * 999) for index in range(3)))
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(ArtifactError, match="is damaged"):
        extract(archive)


def test_the_only_directory_is_the_content(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert content_root(tmp_path) == tmp_path / "model"
    (tmp_path / "file").touch()
    assert content_root(tmp_path) == tmp_path

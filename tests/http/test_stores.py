"""Directories and S3 as stores of objects and journals."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from artifact_helpers import BUCKET, s3_server

from frontend.storage import s3 as s3_module
from frontend.storage.directory import DirectoryObjects
from frontend.storage.objects import ObjectStore, open_store
from frontend.storage.owners import created_at, is_id, new_id
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.journal import FileJournal, TakenError

Opener = Callable[[], ObjectStore]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("home")) as server:
        yield server.variables


@pytest.fixture(params=["directory", "s3"])
def opener(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Return what opens one store again and again, as servers do that share it."""
    if request.param == "directory":
        return lambda: open_store(str(tmp_path / "store"), "some_setting")
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    place = f"s3://{BUCKET}/{tmp_path.name}"
    return lambda: open_store(place, "some_setting")


def test_objects(opener: Opener) -> None:
    store = opener()
    assert (store.get("a/b/c"), store.entries("a/b"), store.folders()) == (None, [], [])
    store.put("a/b/c", b"one")
    store.put("a/b/c", b"other")
    with store.writer("a/b/d") as file:
        file.write(b"0123456789")
    assert opener().get("a/b/c") == b"other"
    assert [(each.name, each.size) for each in store.entries("a/b")] == [("c", 5), ("d", 10)]
    assert (store.read("a/b/d", 0, 4), store.read("a/b/d", 8, 4), store.read("a/b/d", 10, 4)) == (b"0123", b"89", b"")
    assert store.folders() == ["a"]
    with pytest.raises(FileNotFoundError):
        store.read("a/b/x", 0, 4)
    store.remove("a/b/c")
    store.remove("a/b/c")
    assert store.get("a/b/c") is None


def test_nothing_is_left_of_an_object_that_was_not_written_to_its_end(opener: Opener) -> None:
    store = opener()
    with contextlib.suppress(RuntimeError), store.writer("a/x") as file:
        file.write(b"half")
        raise RuntimeError
    assert (store.get("a/x"), store.entries("a")) == (None, [])


def test_a_journal_is_found_again(opener: Opener) -> None:
    journal = opener().journal("a/journals/b")
    journal.append(b"1\n2\n")
    journal.append(b"3\n")
    journal.keep()
    journal.close()
    again = opener().journal("a/journals/b")
    assert b"".join(again.blocks()) == b"1\n2\n3\n"
    again.append(b"4\n")
    again.close()
    third = opener().journal("a/journals/b")
    assert b"".join(third.blocks()) == b"1\n2\n3\n4\n"
    third.close()
    opener().remove_journal("a/journals/b")
    empty = opener().journal("a/journals/b")
    assert b"".join(empty.blocks()) == b""
    empty.close()


def test_half_a_line_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"one\ntwo\n" + b"x" * 3_000_000)
    journal = FileJournal(path)
    assert b"".join(journal.blocks()) == b"one\ntwo\n"
    journal.append(b"three\n")
    journal.close()
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    with pytest.raises(OSError, match="Bad file descriptor"):
        journal.append(b"more\n")


def test_what_a_full_disk_has_taken_of_a_write_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = FileJournal(tmp_path / "journal")
    journal.append(b"one\n")
    write = os.pwrite

    def half(file: int, data: Any, offset: int) -> int:
        if len(data) < 5:
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) // 2], offset)

    monkeypatch.setattr("os.pwrite", half)
    with pytest.raises(OSError, match="No space left"):
        journal.append(b"a line that is cut\n")
    monkeypatch.undo()
    journal.append(b"two\n")
    assert b"".join(journal.blocks()) == b"one\ntwo\n"
    journal.close()


HOLD = """
import sys
from pathlib import Path
from lmi_server.files.journal import FileJournal
journal = FileJournal(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_journal_belongs_to_one_process_until_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(TakenError):
            FileJournal(path)
        other.kill()
        other.wait(60)
    FileJournal(path).close()


@pytest.mark.parametrize("what", ["there are no locks", "the disk is full"])
def test_a_journal_that_cannot_be_opened_says_why_and_leaves_no_file_open(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, what)

    monkeypatch.setattr(*(("fcntl.lockf", fail) if "locks" in what else ("os.fsync", fail)))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=what) as raised:
        FileJournal(tmp_path / "journal")
    assert not isinstance(raised.value, TakenError)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lease_ends_by_itself_and_a_late_owner_finds_out(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}", "some_setting")
    first = store.journal("j")
    first.append(b"1\n")
    with pytest.raises(TakenError):
        store.journal("j")
    monkeypatch.setattr(s3_module, "_lease_end", lambda data: 0.0)
    second = store.journal("j")
    second.append(b"2\n")
    with pytest.raises(TakenError):
        first.append(b"late\n")
    first.close()
    assert b"".join(store.journal("j").blocks()) == b"1\n2\n"


def test_a_lease_is_renewed_while_a_journal_is_read(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3_module, "_RENEWED_S", 0.0)
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}", "some_setting")
    journal = store.journal("j")
    journal.append(b"1\n")
    before = store.get("j/lease")
    assert b"".join(journal.blocks()) == b"1\n"
    assert store.get("j/lease") != before
    journal.close()


@pytest.mark.parametrize("place", ["gs://bucket", "http://x/y"])
def test_other_places_are_refused(place: str) -> None:
    with pytest.raises(ConfigurationError, match="some_setting"):
        open_store(place, "some_setting")


def test_abandoned_uploads_are_removed(tmp_path: Path) -> None:
    DirectoryObjects(tmp_path, "x")
    old, new = tmp_path / ".tmp" / "old", tmp_path / ".tmp" / "new"
    for file in (old, new):
        file.write_bytes(b"")
    os.utime(old, (0, 0))
    DirectoryObjects(tmp_path, "x")
    assert (old.exists(), new.exists()) == (False, True)


def test_ids_sort_by_time_and_are_safe_as_names() -> None:
    ids = [new_id("file-") for _ in range(3)]
    assert all(is_id("file-", each) for each in ids)
    assert created_at(ids[0]) > 1.6e9
    for wrong in ("", "file-", "file-../x", f"{ids[0]}\n", ids[0].upper(), new_id("batch_"), f"../{ids[0]}"):
        assert not is_id("file-", wrong)

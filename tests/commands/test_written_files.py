"""Reports are written whole or not at all, and a full disk is said without a traceback."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.whole_files import replacing, write_text


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file of this process grow beyond 1000 bytes, as on a disk that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_file_that_does_not_fit_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_text(path, "old")
    path.chmod(0o640)
    with pytest.raises(
        ConfigurationError, match=r"report.html cannot be written: .*; free space, or name another file"
    ):
        write_text(path, "x" * 2000)
    assert path.read_text(encoding="utf-8") == "old"
    write_text(path, "new")
    assert (path.read_text(encoding="utf-8"), path.stat().st_mode & 0o777) == ("new", 0o640)
    assert list(tmp_path.iterdir()) == [path]


def test_what_ends_early_leaves_no_file(tmp_path: Path) -> None:
    def stop() -> None:
        with replacing(tmp_path / "report.csv") as file:
            file.write("a,b\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_and_a_device_is_written_directly(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old", encoding="utf-8")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "real").read_text(encoding="utf-8") == "new"
    write_text(Path("/dev/null"), "gone")

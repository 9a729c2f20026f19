"""scripts/release.py: what makes a release the same bytes wherever it is built, and what it refuses."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("release_script", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("setup_environment", None)


def sdist(path: Path, names: tuple[str, ...], mtime: int, owner: str, mode: int) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(f"project-1.0/{name}")
            member.size, member.mtime, member.uname, member.mode = len(name), mtime, owner, mode
            archive.addfile(member, io.BytesIO(name.encode()))
    return path


def test_time_owner_and_order_of_a_build_leave_no_trace(release: Any, tmp_path: Path) -> None:
    one = sdist(tmp_path / "one.tar.gz", ("a", "b"), 1_700_000_000, "ada", 0o644)
    other = sdist(tmp_path / "other.tar.gz", ("b", "a"), 1_800_000_000, "bob", 0o664)
    with pytest.raises(SystemExit, match=r"one\.tar\.gz has other bytes if it is built again"):
        release.compare([one], [other])
    for path in (one, other):
        release.write_reproducibly(path, 1_600_000_000)
    release.compare([one], [other])
    with tarfile.open(one) as archive:
        assert archive.getnames() == ["project-1.0/a", "project-1.0/b"]
        content = archive.extractfile("project-1.0/b")
        assert content is not None
        assert content.read() == b"b"


@pytest.mark.parametrize(
    "line", ["## [Unreleased]", "## [9.9.9]", "## [9.9.90] - 2026-01-01", "## [9x9x9] - 2026-01-01"]
)
def test_a_version_needs_its_part_of_the_changelog(
    release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{line}\n")
    monkeypatch.setattr(release.setup, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r'CHANGELOG.md has no "## \[9.9.9\] - YYYY-MM-DD"'):
        release.refuse_unless_ready("9.9.9")


def test_images_have_the_labels_of_the_version(release: Any) -> None:
    version, commit = release.version_of_project(), release.git("rev-parse", "HEAD")
    release.check_labels(version, commit)
    with pytest.raises(SystemExit, match=r"do not label images with version=9\.9\.9 $"):
        release.check_labels("9.9.9", commit)


def bill(*components: tuple[str, str]) -> str:
    place = {"type": "distribution", "url": "file:///home/ada/checkout"}
    elsewhere = {"type": "vcs", "url": "https://git.example/project"}
    found = [
        {"name": name, "version": version, "externalReferences": [place, elsewhere]} for name, version in components
    ]
    return json.dumps({"components": found})


def test_the_bill_of_materials_names_no_place_of_the_machine(
    release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "BILL", tmp_path / "sbom.cdx.json")
    release.BILL.write_text(bill(("lmi-server", "9.9.9")))
    written = release.bill_of_materials("9.9.9")
    assert "ada" not in written
    assert "git.example" in written


@pytest.mark.parametrize("components", [(), (("lmi-server", "9.9.8"),), (("msgspec", "9.9.9"),)])
def test_a_bill_of_another_version_is_refused(
    release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, components: tuple[tuple[str, str], ...]
) -> None:
    monkeypatch.setattr(release, "BILL", tmp_path / "sbom.cdx.json")
    release.BILL.write_text(bill(*components))
    with pytest.raises(SystemExit, match=r"not 9\.9\.9; run make setup and make sbom again"):
        release.bill_of_materials("9.9.9")

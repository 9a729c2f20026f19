"""The documents name files and folders that are there, and their links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("lmi_server", "handlers", "frontend", "tests", "docs", "benchmarks", "serving.properties.d")
OF_USERS = {
    "model.py",
    "inference.py",
    "code/inference.py",
    "1/model.py",
}  # files of model directories, not of this project

_TWISTED = re.compile(r"\b(?:(?<!each )of which(?! folder)|those that|whoever|nobody|another one)\b", re.IGNORECASE)
_FILE = re.compile(r"`([\w./-]+\.py)`")
_FOLDER = re.compile(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w/]*)`")
_WRITTEN = re.compile(r"\bWrite `([^`]+)`")  # by a step of an example
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def _modules() -> dict[str, set[str]]:
    """Return the paths of all Python files of the project by their names."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            found.setdefault(path.name, set()).add(path.relative_to(ROOT).as_posix())
    return found


MODULES = _modules()


def is_module(name: str) -> bool:
    """Return whether `name` is a module, by its path from the root or by the last parts of it."""
    paths = MODULES.get(Path(name).name, set())
    return any(path == name or path.endswith(f"/{name}") for path in paths)


def missing(document: Path) -> Iterator[str]:
    text = document.read_text(encoding="utf-8")
    present = {*OF_USERS, *_WRITTEN.findall(text)}
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{document.name}:{number}"
        yield from (f"{place}: {name}" for name in _FILE.findall(line) if name not in present and not is_module(name))
        yield from (f"{place}: {name}" for name in _FOLDER.findall(line) if not (ROOT / name).is_dir())
        yield from (f"{place}: {link}" for link in _LINK.findall(line) if not (document.parent / link).exists())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.relative_to(ROOT).as_posix())
def test_a_document_names_what_is_there(document: Path) -> None:
    assert list(missing(document)) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.relative_to(ROOT).as_posix())
def test_the_sentences_of_a_document_are_plain(document: Path) -> None:
    assert list(twisted(document)) == []


def test_the_sentences_of_the_code_are_plain() -> None:
    sources = [path for package in FOLDERS[:3] for path in (ROOT / package).rglob("*.py")]
    assert [line for path in sorted(sources) for line in twisted(path)] == []


def twisted(path: Path) -> Iterator[str]:
    """Yield the lines whose relative clause has no noun before it: name what is meant, or begin a second sentence."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if _TWISTED.search(line):
            yield f"{path.relative_to(ROOT).as_posix()}:{number}: {line.strip()}"

"""Extracts untrusted archives, in a program of their own: see `unpacking/`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lmi_server.artifacts.child_process import ChildResult, run_child
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.store import file_errors
from lmi_server.artifacts.unpacking.limits import ArchiveLimits
from lmi_server.contract.errors import ArtifactError

_CODE = Path(__file__).resolve().parents[2]  # the directory of the package lmi_server
_NOTHING: Mapping[str, str] = {}
_NEEDED_BY_PYTHON = ("LD_LIBRARY_PATH",)


def extract_archive(
    archive: Path,
    target: Path,
    limits: ArchiveLimits,
    activity: Activity,
    *,
    environment: Mapping[str, str] = _NOTHING,
    inherited: Sequence[int] = (),
) -> None:
    """Extract `archive` (tar in any compression, or zip) into the empty directory `target`.

    The program that does it inherits the open descriptors `inherited`. Raises ArtifactError if an entry is unsafe, or
    if the archive is damaged or over the limits. The caller must then throw `target` away, which may hold a part of
    the files.
    """
    # A file in memory: a container may have no directory for temporary files.
    with open(os.memfd_create("unpacking"), "w+b") as progress:
        seen = _UnpackingProgress(progress, archive.name, archive.stat().st_size, activity)
        try:
            ended = run_child(
                _command(archive, target, limits, progress.fileno()),
                environment=_environment(environment),
                activity=activity,
                inherited=(*inherited, progress.fileno()),
                on_tick=seen.report,
            )
        except OSError as error:
            raise ArtifactError(f"{archive}: {sys.executable} cannot be started to unpack it: {error}") from error
        if ended.code != 0:
            raise ArtifactError(f"{archive}: {_why_ended(ended, archive, limits)}")
        if ended.stdout:
            _raise_problem(json.loads(ended.stdout), archive, target)
        seen.end()


def _command(archive: Path, target: Path, limits: ArchiveLimits, progress: int) -> Sequence[str]:
    # -S: the program needs nothing but the standard library, and finds it sooner.
    options = ("-P", "-S", "-X", "utf8", "-m", "lmi_server.artifacts.unpacking")
    arguments = (str(archive), str(target), json.dumps(limits._asdict()), str(progress))
    return (sys.executable, *options, *arguments)


def _environment(given: Mapping[str, str]) -> Mapping[str, str]:
    """Return as little as possible: what reads an untrusted archive has no use for keys and tokens."""
    return {"PYTHONPATH": str(_CODE), **{name: given[name] for name in _NEEDED_BY_PYTHON if name in given}}


@dataclass(slots=True)
class _UnpackingProgress:
    """Reports what the program has written to the file `source` since the last time: how far it is in the archive.

    What the files take in all is known only at the end.
    """

    source: BinaryIO
    name: str
    size: int
    activity: Activity
    position: int = 0
    reached: int = 0

    def report(self) -> None:
        data = os.pread(self.source.fileno(), 1 << 20, self.position)
        whole = data[: data.rfind(b"\n") + 1]
        self.position += len(whole)
        for done in whole.split():
            self._report(int(done))

    def end(self) -> None:
        """Report what is left, and the whole."""
        self.report()
        self._report(self.size)

    def _report(self, done: int) -> None:
        self.reached = min(max(self.reached, done), self.size)  # the entries of a zip lie in any order
        self.activity.report(f"extracting {self.name}", self.reached, self.size)


def _raise_problem(problem: Mapping[str, Any], archive: Path, target: Path) -> None:
    if "message" in problem:
        raise ArtifactError(f"{archive}: {problem['message']}")
    with file_errors(target):
        raise OSError(problem["errno"], os.strerror(problem["errno"]))


def _why_ended(ended: ChildResult, archive: Path, limits: ArchiveLimits) -> str:
    if ended.code == -signal.SIGXCPU:
        seconds = limits.processor_seconds(archive.stat().st_size)
        return f"takes more than {seconds} seconds of processor time to be unpacked; it is refused as a bomb"
    last = (ended.stderr.strip().splitlines() or ["it gave no reason"])[-1]
    return f"cannot be unpacked (exit code {ended.code}): {last}"


def content_root(directory: Path) -> Path:
    """Return the only entry of `directory` if that is a directory; else `directory` itself."""
    with os.scandir(directory) as found:
        entries = list(found)
    if len(entries) == 1 and entries[0].is_dir(follow_symlinks=False):
        return directory / entries[0].name
    return directory


def visible_files(directory: Path) -> Iterator[Path]:
    """Yield the entries of `directory` without hidden ones."""
    return (path for path in directory.iterdir() if not path.name.startswith("."))

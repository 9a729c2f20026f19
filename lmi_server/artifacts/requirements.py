"""Installs a model's `requirements.txt` into a directory of its own, which goes on the PYTHONPATH of its workers.

Packages that the interpreter already has in a suitable version are not installed again: a line `transformers` must not
bring a second torch. The packages of the server itself never change.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lmi_server.artifacts.child_process import ChildResult, ChildTimeoutError, run_child
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.store import StoreEntry, digest_of, entry, fill, importable, no_room, read_errors
from lmi_server.contract.errors import ArtifactError

REQUIREMENTS = "requirements.txt"

_WHEELHOUSE = "wheelhouse"
_LMI_WHEELHOUSE = "requirements"
_REASON_LINES = 6


class RequirementsManifest(msgspec.Struct, frozen=True):
    """What was installed: the file, and URLs with hashes as pip takes them."""

    source: str
    installed: list[str]


@dataclass(frozen=True, slots=True)
class Installer:
    """How to install: the interpreter of workers, pip's environment, its time limit in seconds, the store's root.

    `pip` is an interpreter with pip, if that of the workers has none.
    """

    python: str
    environment: Mapping[str, str]
    limit_s: float
    root: Path
    pip: str | None = None

    @property
    def command(self) -> Sequence[str]:
        """Return the beginning of a command of pip."""
        # -P: a file of the model must not take the place of a module that pip imports.
        target = () if self.pip is None else ("--python", self.python)
        return (self.pip or self.python, "-P", "-m", "pip", *target)


def install_requirements(model_dir: Path, installer: Installer, activity: Activity) -> Path | None:
    """Install `requirements.txt` of `model_dir` and return the target directory; None if there is no such file.

    If the model has a folder `wheelhouse/`, pip uses it alone. With LMI's folder `requirements/`, pip tries that alone
    first, and the package index only if the folder lacks a package. Raises ArtifactError with pip's reason, and
    ConfigurationError if Python cannot have the target on its path.
    """
    source = model_dir / REQUIREMENTS
    if not source.is_file():
        return None
    with read_errors():
        identity = _identity(source, model_dir, installer.python, activity)
    place = entry(importable(installer.root), "requirements", identity, "site-packages")

    def install(lock: int) -> RequirementsManifest:
        activity.report(f"installing {source}")
        pip = _Pip(source, model_dir, place, installer, activity, lock)
        return RequirementsManifest(str(source), pip.install(_where_to_look(model_dir)))

    return fill(place, RequirementsManifest, activity, install)


def _where_to_look(model_dir: Path) -> Sequence[Sequence[str]]:
    """Return pip's arguments about sources for each attempt, the first one first."""
    wheelhouse, lmi = model_dir / _WHEELHOUSE, model_dir / _LMI_WHEELHOUSE
    if wheelhouse.is_dir():
        return [("--no-index", "--find-links", str(wheelhouse))]
    if lmi.is_dir():
        return [("--no-index", "--find-links", str(lmi)), ("--find-links", str(lmi))]
    return [()]


class _Pip:
    """Runs pip for one model.

    A dry run says which packages are missing from the interpreter; only these are installed, without their
    dependencies. `pip install --target` alone would install every dependency again, torch included.
    """

    def __init__(
        self, source: Path, model_dir: Path, place: StoreEntry, installer: Installer, activity: Activity, lock: int
    ) -> None:
        self._source = source
        self._model_dir = model_dir
        self._place = place
        self._activity = activity
        self._installer = installer
        self._lock = lock

    def install(self, places: Sequence[Sequence[str]]) -> list[str]:
        """Install from the first of `places` (pip's arguments) that has all packages; return their URLs."""
        *attempts, last = places
        for look in attempts:
            try:
                return self._install_from(look)
            except ArtifactError:
                lacking = f"{_LMI_WHEELHOUSE}/ does not hold all of {self._source}"
                self._activity.report(f"{lacking}; asking the package index")
        return self._install_from(last)

    def _install_from(self, look: Sequence[str]) -> list[str]:
        """Install the missing packages; return their URLs."""
        report = self._place.partial / "report.json"
        self._run(["--dry-run", "--report", str(report), "-r", str(self._source), *look])
        missing = _missing(report)  # without what the interpreter has, because the dry run had no --target
        report.unlink()
        if missing:
            self._run(["--no-deps", "--target", str(self._place.partial_files), *look, *missing])
        return missing

    def _run(self, arguments: Sequence[str]) -> None:
        command = [*self._installer.command, "install", *_QUIET, *arguments]
        try:
            ended = run_child(
                command,
                environment=self._installer.environment,
                activity=self._activity,
                directory=self._model_dir,  # a line "./wheels/x.whl" means a file of the model
                limit_s=self._installer.limit_s,
                inherited=(self._lock,),
                on_tick=lambda: self._activity.report(f"installing {self._source}"),
            )
        except ChildTimeoutError:
            raise ArtifactError(
                f"{self._source}: pip did not end within model_loading_timeout={self._installer.limit_s:g} seconds; "
                f"raise it, or put the wheels into {self._model_dir / _WHEELHOUSE}"
            ) from None
        except OSError as error:
            raise ArtifactError(f"{self._source}: {self._installer.python} cannot be started: {error}") from error
        if ended.code != 0:
            raise self._error_of(ended)

    def _error_of(self, ended: ChildResult) -> ArtifactError:
        if "No space left on device" in ended.stderr:
            return ArtifactError(no_room(self._place.directory))
        return ArtifactError(f"{self._source}: pip could not install it (exit code {ended.code}): {_reason(ended)}")


_QUIET = ("--no-input", "--disable-pip-version-check", "--no-color", "--progress-bar=off", "--root-user-action=ignore")


def _missing(report: Path) -> list[str]:
    """Return the URL of each package that pip would install, with its hash.

    Names and versions would let the second run of pip resolve to other files than the first.
    """
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return [_url(item) for item in found["install"]]


def _url(item: dict[str, Any]) -> str:
    download = item["download_info"]
    name = item["metadata"]["name"]
    if "vcs_info" in download:
        return f"{name} @ {download['vcs_info']['vcs']}+{download['url']}@{download['vcs_info']['commit_id']}"
    hashes = download.get("archive_info", {}).get("hashes", {})
    fragment = "".join(f"#{kind}={value}" for kind, value in sorted(hashes.items())[:1])
    return f"{name} @ {download['url']}{fragment}"


def _reason(ended: ChildResult) -> str:
    """Return pip's error messages without the rest of its output."""
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return "; ".join(errors[:_REASON_LINES] or lines[-_REASON_LINES:]) or "pip gave no reason"


def _identity(source: Path, model_dir: Path, python: str, activity: Activity) -> str:
    """Return a text that changes if the packages must be installed again."""
    digest = hashlib.sha256()
    for path in sorted(set(_named_files(source, model_dir))):
        digest.update(f"{path.relative_to(model_dir)}\0".encode())
        digest.update(bytes.fromhex(digest_of(path, activity)))
    interpreter = Path(python).resolve()
    # `python` is part of it, too: two virtual environments of one interpreter hold different packages.
    return f"{digest.hexdigest()}\0{python}\0{interpreter}\0{interpreter.stat().st_mtime_ns}"


def _named_files(source: Path, model_dir: Path) -> Iterator[Path]:
    """Yield `source`, the files of the model that its lines name (`-r`, `-c`, wheels), and its wheels."""
    yield from _reachable(source, model_dir, set())
    for folder in (_WHEELHOUSE, _LMI_WHEELHOUSE):
        if (model_dir / folder).is_dir():
            yield from (path for path in (model_dir / folder).iterdir() if path.is_file())


def _reachable(source: Path, model_dir: Path, seen: set[Path]) -> Iterator[Path]:
    if source in seen:
        return
    seen.add(source)
    yield source
    if source.suffix != ".txt":
        return
    for line in source.read_text(encoding="utf-8", errors="replace").splitlines():
        for word in _words(line):
            named = model_dir / word
            if named.is_file() and named.is_relative_to(model_dir):
                yield from _reachable(named, model_dir, seen)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()

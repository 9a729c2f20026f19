"""The directory that keeps fetched files. Under its final name, an entry is complete.

    <root>/<kind>/<digest>/NAME/         the files, under the name that the model has at its source
    <root>/<kind>/<digest>/manifest.json what they were fetched from; written last
    <root>/<kind>/<digest>.partial/      the same while it is being filled; used again only after a check
    <root>/<kind>/<digest>.lock          locked by the server that fills it

A killed server leaves a `.partial` behind; the next one checks and completes it. The lock is a kernel lock (flock): it
ends with the last process that has its descriptor, and children that write here inherit the descriptor. So a server
never starts to fill an entry that a child of a killed server still writes to.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from lmi_server.artifacts.progress import Activity
from lmi_server.contract.errors import ArtifactError, ConfigurationError
from lmi_server.contract.texts.sizes import in_words

LOCK_POLL_S = 0.2
_CHUNK = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_Manifest = TypeVar("_Manifest", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One entry of the store: `directory` is its final path, `name` the directory of files in it."""

    directory: Path
    name: str

    @property
    def files(self) -> Path:
        return self.directory / self.name

    @property
    def partial(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.partial")

    @property
    def partial_files(self) -> Path:
        return self.partial / self.name

    def manifest(self, manifest_type: type[_Manifest]) -> _Manifest | None:
        """Return the manifest of the complete files; None if the entry is not complete."""
        try:
            return msgspec.json.decode((self.directory / "manifest.json").read_bytes(), type=manifest_type)
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return None

    def publish(self, manifest: msgspec.Struct) -> None:
        """Replace the complete files by the partial ones, with a rename. The caller must hold the claim."""
        _sync_tree(self.partial_files)
        _write_through(self.partial / "manifest.json", msgspec.json.encode(manifest))
        # Renames, not a removal in place: if the server dies in between, the old or the new files are complete under
        # some name. Workers that have opened old files keep them until they close them.
        outdated = self.directory.with_name(f"{self.directory.name}.outdated")
        shutil.rmtree(outdated, ignore_errors=True)
        if self.directory.exists():
            self.directory.rename(outdated)
        self.partial.rename(self.directory)
        shutil.rmtree(outdated, ignore_errors=True)

    def discard_partial(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)


def entry(root: Path, kind: str, identity: str, name: str) -> StoreEntry:
    """Return the entry under `root` for `identity`, a URL or a path with its version."""
    # The digest keeps apart models of the same name; 20 digits are 80 bits, and keep paths readable.
    digest = hashlib.sha256(identity.encode()).hexdigest()[:20]
    plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII).lstrip(".") or "model"
    return StoreEntry(root / kind / digest, plain)


@contextmanager
def claim(place: StoreEntry, activity: Activity) -> Iterator[int]:
    """Lock `place` against other servers; yield the descriptor of the lock, for children that write there.

    Waits while another server holds the lock. Raises ArtifactError if the root is not writable.
    """
    lock_path = place.directory.with_name(f"{place.directory.name}.lock")
    descriptor = wait_for_lock(lock_path, fcntl.LOCK_EX, activity, f"another server that fills {place.directory}")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def fill(
    place: StoreEntry, manifest_type: type[msgspec.Struct], activity: Activity, make: Callable[[int], msgspec.Struct]
) -> Path:
    """Return the files of `place`; without a complete entry, `make` fills its partial directory.

    `make` gets the descriptor of the lock, and returns the manifest. Raises ArtifactError.
    """
    with claim(place, activity) as lock:
        if place.manifest(manifest_type) is None:
            place.discard_partial()
            with file_errors(place.directory):
                place.partial_files.mkdir(parents=True)
            try:
                manifest = make(lock)
                with file_errors(place.directory):
                    place.publish(manifest)
            finally:
                place.discard_partial()
    return place.files


def require_room(directory: Path, needed: int, keep_free: int) -> None:
    """Raise ArtifactError if `needed` more bytes would leave less than `keep_free` on the disk of `directory`."""
    free = shutil.disk_usage(directory).free
    if needed + keep_free > free:
        left = in_words(max(0, free - keep_free))
        raise ArtifactError(
            f"{directory}: {in_words(needed)} are needed and {left} are left on this disk; "
            "make room, or set SERVING_DOWNLOAD_DIR to a directory on a larger one"
        )


@contextmanager
def file_errors(directory: Path) -> Iterator[None]:
    """Turn errors of the file system under `directory` into an ArtifactError with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise  # not from the file system: gzip and others derive their errors from OSError
        if error.errno in _NO_ROOM:
            raise ArtifactError(no_room(directory)) from error
        raise ArtifactError(
            f"{error.filename or directory}: cannot be written: {error.strerror or error}; "
            "set SERVING_DOWNLOAD_DIR to a directory that this user may write to"
        ) from error


def digest_of(path: Path, activity: Activity) -> str:
    """Return the SHA-256 of a file, with a MiB of it at a time in memory.

    Raises ArtifactError if `activity` is cancelled, OSError if the file cannot be read.
    """
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            activity.check()  # a file with a hole may have any length
            found.update(chunk)
    return found.hexdigest()


@contextmanager
def read_errors() -> Iterator[None]:
    """Turn errors in reading files of a model, or an interpreter, into an ArtifactError with a remedy."""
    try:
        yield
    except OSError as error:
        raise ArtifactError(
            f"{error.filename}: cannot be read: {error.strerror or error}; let the server's user {os.geteuid()} read it"
        ) from error


def no_room(directory: Path) -> str:
    return f"{directory}: the disk is full; make room, or set SERVING_DOWNLOAD_DIR to a directory on a larger one"


def importable(directory: Path) -> Path:
    """Return a directory for the PYTHONPATH of workers. Raises ConfigurationError if its path would be read as two."""
    if os.pathsep in str(directory):
        raise ConfigurationError(
            f'{directory}: Python takes "{os.pathsep}" for the end of a path; set SERVING_DOWNLOAD_DIR to a directory '
            "without it"
        )
    return directory


def wait_for_lock(path: Path, kind: int, activity: Activity, holder: str) -> int:
    """Return the descriptor of a lock file once it is locked; `holder` names in words what is waited for.

    Raises ArtifactError if it cannot be written, and what `activity` raises when the wait is cancelled.
    """
    with file_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Polling instead of a blocking flock, so that a cancelled fetch stops to wait.
        while (descriptor := lock_file(path, kind)) is None:
            activity.report(f"waiting for {holder}")
            activity.pause(LOCK_POLL_S)
        return descriptor


def lock_file(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Lock a file, made if it is not there; return its descriptor, None while another lock excludes `kind`.

    The holder of the exclusive lock may remove the file, which ends what it excludes. Raises OSError if it cannot be
    opened, or is a link: that would lock, or make, a file elsewhere.
    """
    while True:
        with ExitStack() as opened:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            opened.callback(os.close, descriptor)
            if not try_lock(descriptor, kind):
                return None
            if _is_at(path, descriptor):  # else it was removed after it was opened, and excludes no one
                opened.pop_all()
                return descriptor


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file unless another descriptor has a lock that excludes `kind`; return whether it is locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync_tree(directory: Path) -> None:
    """Write all files through to the disk, so that the manifest is true even after a power failure."""
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                _sync(path)
        _sync(parent)


def _write_through(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(str(path))
    _sync(str(path.parent))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

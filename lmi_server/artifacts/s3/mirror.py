"""Keeps a local copy of the objects below an S3 prefix: resumes, checks ETags, and fetches only what has changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import msgspec

from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.s3.clients import Download, S3Client, S3Object, S3UnreachableError
from lmi_server.artifacts.s3.etag import Verdict, compare, md5
from lmi_server.artifacts.store import StoreEntry, claim, entry, file_errors, require_room
from lmi_server.contract.errors import ArtifactError, ArtifactMissingError

logger = logging.getLogger(__name__)

_HASHED_AT_ONCE = 4  # files; hashing is faster than most networks, and the engines of other models need the cores


class S3Manifest(msgspec.Struct, frozen=True):
    """The prefix and the objects that a complete copy was fetched from."""

    url: str
    objects: list[S3Object]


def fetch_s3(client: S3Client, root: Path, keep_free: int, activity: Activity) -> Path:
    """Bring the copy of the client's location under `root` up to date and return its directory.

    If that is the key of one object, the directory holds that object. A download leaves `keep_free` bytes of the disk
    free. Raises ArtifactError; the next call checks the files that have arrived by then, and goes on from there.
    """
    location = client.location
    place = entry(root, "s3", location.url, PurePosixPath(location.prefix).name or location.bucket)
    with claim(place, activity) as lock:
        try:
            objects = client.list_objects(activity)
        except S3UnreachableError as error:
            return _use_offline_copy(place, error)
        if not objects:
            raise ArtifactMissingError(f"{location.url}: there are no objects; check bucket and prefix")
        if not _is_current(place, objects):
            with file_errors(place.directory):
                _refresh(place, client, objects, keep_free, activity, lock)
    return place.files


def _use_offline_copy(place: StoreEntry, error: S3UnreachableError) -> Path:
    """Return the complete copy of an earlier start, for a machine that is offline. Raises `error` without one."""
    manifest = place.manifest(S3Manifest)
    if manifest is None or not _sizes_match(place, manifest):
        raise error
    logger.warning("%s; using the copy in %s", error.message, place.files)
    return place.files


def _is_current(place: StoreEntry, objects: list[S3Object]) -> bool:
    manifest = place.manifest(S3Manifest)
    return manifest is not None and manifest.objects == objects and _sizes_match(place, manifest)


def _sizes_match(place: StoreEntry, manifest: S3Manifest) -> bool:
    return all(
        download.path.is_file() and download.path.stat().st_size == download.source.size
        for download in _downloads(place.files, manifest.url, manifest.objects)
    )


def _refresh(
    place: StoreEntry, client: S3Client, objects: list[S3Object], keep_free: int, activity: Activity, lock: int
) -> None:
    """Complete the partial files and publish them. Files that have not changed are linked from the last copy."""
    # The partial directory may hold files of an interrupted fetch. Files that match their objects count as fetched.
    url = client.location.url
    wanted = _downloads(place.partial_files, url, objects)
    place.partial_files.mkdir(parents=True, exist_ok=True)
    _remove_all_but(place.partial_files, {download.path for download in wanted})
    for download in wanted:
        download.path.parent.mkdir(parents=True, exist_ok=True)
        _link_unchanged(place, download)
    verdicts = _verdicts(wanted, activity, f"checking {place.name}")
    missing = [download for download, verdict in zip(wanted, verdicts, strict=True) if verdict is not Verdict.SAME]
    transfer = _Transfer(client, activity, lock, _size(wanted))
    require_room(place.partial, _size(missing), keep_free)
    transfer.run(missing, already=_size(wanted) - _size(missing))
    _verify(missing, transfer, activity)
    place.publish(S3Manifest(url, objects))


def _downloads(directory: Path, url: str, objects: Iterable[S3Object]) -> list[Download]:
    prefix = url.partition("://")[2].partition("/")[2]
    return [Download(found, directory / _relative(found.key, prefix)) for found in objects]


def _relative(key: str, prefix: str) -> PurePosixPath:
    """Return the path below the model's directory. Raises ArtifactError if the key leads out of it."""
    rest = key.rpartition("/")[2] if key == prefix else key.removeprefix(f"{prefix}/" if prefix else "")
    parts = rest.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(letter in rest for letter in "\0\n\r"):
        raise ArtifactError(f"object {key!r}: its key cannot be the path of a file; rename it on S3")
    return PurePosixPath(*parts)


def _remove_all_but(directory: Path, wanted: set[Path]) -> None:
    """Remove files that are no longer on S3, and temporary files of an interrupted transfer."""
    for parent, _, names in os.walk(directory):
        for name in names:
            path = Path(parent, name)
            if path not in wanted:
                path.unlink()


def _link_unchanged(place: StoreEntry, download: Download) -> None:
    """Give a file of the last copy a second name (a hard link), so that it is fetched again only if it changed."""
    last = place.files / download.path.relative_to(place.partial_files)
    if not download.path.exists() and last.is_file():
        os.link(last, download.path)


def _verdicts(downloads: Sequence[Download], activity: Activity, what: str) -> list[Verdict]:
    """Compare the files with their objects."""
    verdicts = []
    done, total = 0, _size(downloads)
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as executor:
        for download, verdict in zip(downloads, executor.map(_verdict, downloads), strict=True):
            verdicts.append(verdict)
            done += download.source.size
            activity.report(what, done, total)
    return verdicts


def _verdict(download: Download) -> Verdict:
    return compare(download.path, download.source.size, download.source.etag)


def _size(downloads: Iterable[Download]) -> int:
    return sum(download.source.size for download in downloads)


class _Transfer:
    """Fetches files from one location and reports the bytes."""

    def __init__(self, client: S3Client, activity: Activity, lock: int, total: int) -> None:
        self._client = client
        self._activity = activity
        self._lock = lock
        self._total = total

    def run(self, downloads: Sequence[Download], already: int = 0) -> None:
        """Fetch `downloads`; of the total, `already` bytes are on the disk."""
        for download in downloads:
            # Never write into the existing file: it may be a hard link to a file that a running worker reads.
            download.path.unlink(missing_ok=True)
        size = _size(downloads)
        full = [download for download in downloads if download.source.size]
        if full:
            # Not the last byte: the total is reported once the files are complete.
            report = lambda done: self._report(already + max(0, min(done, size - 1)))  # noqa: E731
            self._client.download(full, self._activity, report, self._lock)
        for download in downloads:
            if not download.source.size:
                download.path.touch()
        self._report(already + size)

    def _report(self, done: int) -> None:
        self._activity.report(f"downloading {self._client.location.url}", done, self._total)


def _verify(fetched: Sequence[Download], transfer: _Transfer, activity: Activity) -> None:
    """Raise ArtifactError if a file differs from its object.

    A different digest has two causes: the bytes are damaged, or the ETag is no digest, because the object is encrypted.
    Fetching the smallest file again separates them: if the same bytes arrive twice, the ETags are no digests, and only
    the sizes are checked. Otherwise all differing files are fetched again, once.
    """
    different = _different(fetched, activity)
    short = [download for download in different if download.path.stat().st_size != download.source.size]
    if not different:
        return
    if not short and _etags_are_no_digests(min(different, key=lambda download: download.source.size), transfer):
        logger.warning(
            "%d files were checked by size only, because their ETags are not digests of their content", len(different)
        )
        return
    transfer.run(different)
    for download in _different(different, activity):
        raise ArtifactError(
            f"{download.source.key}: the download differs from what S3 lists (size {download.source.size}, "
            f"ETag {download.source.etag}), twice; try again when the upload is complete"
        )


def _different(downloads: Sequence[Download], activity: Activity) -> list[Download]:
    verdicts = _verdicts(downloads, activity, "checking the download")
    return [file for file, verdict in zip(downloads, verdicts, strict=True) if verdict is Verdict.DIFFERENT]


def _etags_are_no_digests(probe: Download, transfer: _Transfer) -> bool:
    before = md5(probe.path)
    transfer.run([probe])
    return md5(probe.path) == before

"""Fetches everything that must be on this machine before the workers of a model start."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from lmi_server.artifacts.archive import content_root, extract_archive, visible_files
from lmi_server.artifacts.environments.environment import EngineEnvironment, EnvironmentMaker
from lmi_server.artifacts.hub import fetch_hub_model
from lmi_server.artifacts.interpreter import Interpreters, WorkerPython
from lmi_server.artifacts.location import (
    RAY_MODEL_FILE,
    RAY_MODEL_NAME,
    GgufFile,
    HubModel,
    LocalArchive,
    LocalDirectory,
    LocalModelFile,
    Location,
    S3Location,
    archive_stem,
    parse_location,
)
from lmi_server.artifacts.own_thread import in_own_thread
from lmi_server.artifacts.progress import Activity, OnProgress
from lmi_server.artifacts.requirements import Installer, install_requirements
from lmi_server.artifacts.s3.clients import find_client
from lmi_server.artifacts.s3.mirror import fetch_s3
from lmi_server.artifacts.store import entry, file_errors, fill
from lmi_server.artifacts.unpacking.limits import ArchiveLimits
from lmi_server.contract.errors import ArtifactError
from lmi_server.contract.progress import Progress
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ArtifactSettings:
    """Where fetched files are kept (`root`), and how they are fetched.

    `environment` is that of s5cmd, boto3, pip and uv. A download leaves at least `keep_free` bytes of the disk free.
    Environments of engines that no model uses may take `unused_environment_bytes`.
    """

    root: Path
    environment: Mapping[str, str]
    limits: ArchiveLimits = field(default_factory=ArchiveLimits)
    keep_free: int = 256 << 20
    python: str = sys.executable
    unused_environment_bytes: int = 20 << 30


@dataclass(frozen=True, slots=True)
class Artifacts:
    """What a worker needs: the directory of its model, those to put first on its PYTHONPATH, and its interpreter.

    `environment` is that of its engine, if the model has one of its own.
    """

    model_id: str
    python_path: tuple[str, ...] = ()
    python: str = sys.executable
    environment: EngineEnvironment | None = None


def artifact_settings(
    download_dir: str | None, environment: Mapping[str, str], unused_environments_gb: float = 20.0
) -> ArtifactSettings:
    """Return the settings with `download_dir`; without it, with that of the variables, or the user's cache directory.

    A server has read the variables already. Commands that start none have not.
    """
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    named = download_dir or environment.get("SERVING_DOWNLOAD_DIR") or environment.get("DJL_CACHE_DIR")
    root = Path(named) if named else cache / "lmi-server"
    unused = int(min(unused_environments_gb * 2**30, sys.maxsize))  # a product of floats may be infinite
    return ArtifactSettings(root.absolute(), environment, unused_environment_bytes=unused)


def empty_directory(settings: ArtifactSettings) -> Path:
    """Return an empty directory, for models that are nothing but a Hugging Face id; all servers may share it.

    Raises ArtifactError if it cannot be made.
    """
    directory = settings.root / "empty"
    with file_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


async def fetch_artifacts(
    model_dir: Path,
    model_id: str,
    settings: ArtifactSettings,
    *,
    revision: str | None = None,
    python: WorkerPython | None = None,
    code_dir: Path | None = None,
    limit_s: float = 1800.0,
    on_progress: OnProgress = lambda progress: None,
) -> Artifacts:
    """Fetch the model that `model_id` names, and install the `requirements.txt` of `code_dir` for its `python`.

    `code_dir` is `model_dir` if it is not given. `model_id` is a path (absolute, or relative to `model_dir`), an
    archive, a file in GGUF, a Hugging Face id (at `revision`) or s3://bucket/prefix. pip may take `limit_s` seconds.
    `on_progress` is called on this event loop. A cancellation stops the download or pip. Raises ArtifactError, and
    ConfigurationError if workers cannot run in `python`; a later call never uses files that are incomplete.
    """

    def fetch(activity: Activity) -> Artifacts:
        maker = EnvironmentMaker(
            settings.root, settings.environment, settings.unused_environment_bytes, limit_s, settings.keep_free
        )
        interpreters = Interpreters(settings.python, settings.environment, settings.root, maker, activity)
        interpreter = interpreters.prepare(python or WorkerPython(), model_dir)
        directory = _bring(_location(model_id, model_dir), revision, settings, activity)
        pip = None if interpreter.environment is None else settings.python
        installer = Installer(interpreter.path, settings.environment, limit_s, settings.root, pip)
        target = install_requirements(code_dir or model_dir, installer, activity)
        python_path = (*(() if target is None else (str(target),)), *interpreter.python_path)
        return Artifacts(str(directory), python_path, interpreter.path, interpreter.environment)

    return await _in_thread(fetch, on_progress)


async def fetch_model_directory(
    url: str, settings: ArtifactSettings, *, on_progress: OnProgress = lambda progress: None
) -> Path:
    """Fetch the model directory at `url`, the one that may hold a serving.properties, and return its local path.

    `url` has the grammar of `model_id` in `fetch_artifacts`. A directory with nothing but one archive stands for that
    archive. The name of the returned directory is that of the model. Raises ArtifactError.
    """

    def fetch(activity: Activity) -> Path:
        directory = _bring(_location(url, Path.cwd()), None, settings, activity)
        with file_errors(directory):
            archive = only_archive(directory)
        return directory if archive is None else _extract(archive, settings, activity)

    return await _in_thread(fetch, on_progress)


async def list_folders(url: str, settings: ArtifactSettings) -> frozenset[str]:
    """Return the names of the folders right below s3://bucket/prefix. Raises ArtifactError."""
    location = _location(url.rstrip("/"), Path.cwd())
    assert isinstance(location, S3Location), "a store that is no directory"
    beginning = f"{location.prefix}/" if location.prefix else ""

    def list_keys(activity: Activity) -> frozenset[str]:
        objects = find_client(settings.environment, location).list_objects(activity)
        keys = (found.key.removeprefix(beginning) for found in objects if found.key.startswith(beginning))
        return frozenset(key.partition("/")[0] for key in keys if "/" in key)

    return await _in_thread(list_keys, lambda _: None)


def only_archive(directory: Path) -> Path | None:
    """Return the archive if a directory holds nothing else: it is the model then; None if there is none.

    Raises OSError.
    """
    files = list(visible_files(directory))
    is_archive = len(files) == 1 and files[0].is_file() and archive_stem(files[0].name) is not None
    return files[0] if is_archive else None


async def _in_thread(fetch: Callable[[Activity], _Result], on_progress: OnProgress) -> _Result:
    """Run `fetch` in a thread; on cancellation, wait until the thread has released its files and locks."""
    loop = asyncio.get_running_loop()

    def report(progress: Progress) -> None:
        loop.call_soon_threadsafe(on_progress, progress)

    # A thread cannot be cancelled from outside. Activity.cancel makes its next report or check raise instead, and the
    # shield keeps the future alive until that has happened.
    activity = Activity(report)
    fetching = asyncio.ensure_future(in_own_thread(fetch, activity))
    try:
        return await asyncio.shield(fetching)
    except asyncio.CancelledError:
        activity.cancel()
        with contextlib.suppress(ArtifactError):
            await fetching
        raise


def _location(text: str, base: Path) -> Location:
    try:
        return parse_location(text, base)
    except ValueError as error:
        raise ArtifactError(f'model "{excerpt(SECRETS.mask(text), 200)}" {error}') from error


def _bring(location: Location, revision: str | None, settings: ArtifactSettings, activity: Activity) -> Path:
    match location:
        case LocalDirectory(path):
            return path
        case LocalArchive(path):
            return _extract(path, settings, activity)
        case GgufFile(path):
            return path
        case LocalModelFile(path, member):
            return _directory_of_model_file(path, member, settings)
        case HubModel():
            return fetch_hub_model(location, revision, activity)
        case S3Location():
            return _from_s3(location, settings, activity)


def _from_s3(location: S3Location, settings: ArtifactSettings, activity: Activity) -> Path:
    client = find_client(settings.environment, location)
    directory = fetch_s3(client, settings.root, settings.keep_free, activity)
    # If the location is the key of an archive, the directory holds that one file.
    archive = directory / location.prefix.rpartition("/")[2]
    if archive_stem(location.prefix) and archive.is_file():
        return _extract(archive, settings, activity)
    return directory


def _directory_of_model_file(path: Path, member: str | None, settings: ArtifactSettings) -> Path:
    """Return a model directory with nothing but a link to the model file, so that messages name the file itself.

    Of an application file, it also says which of the models it has.
    """
    identity = str(path) if member is None else f"{path}\0{member}"
    directory = entry(settings.root, "model-files", identity, path.stem).files
    link = directory / RAY_MODEL_FILE
    with file_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # of an earlier start, or of another server
            link.symlink_to(path)
        if member is not None:
            (directory / RAY_MODEL_NAME).write_text(member, encoding="utf-8")
    return directory


class _ArchiveManifest(msgspec.Struct, frozen=True):
    source: str


def _extract(archive: Path, settings: ArtifactSettings, activity: Activity) -> Path:
    """Return the directory with the content of `archive`; extract it if that was not done before."""
    with file_errors(archive):
        state = archive.stat()
    # An archive that is replaced under the same name is another entry of the store.
    identity = f"{archive}\0{state.st_size}\0{state.st_mtime_ns}"
    place = entry(settings.root, "archives", identity, archive_stem(archive.name) or archive.name)

    def extract(lock: int) -> _ArchiveManifest:
        target, environment = place.partial_files, settings.environment
        with file_errors(place.directory):
            extract_archive(archive, target, settings.limits, activity, environment=environment, inherited=(lock,))
        return _ArchiveManifest(str(archive))

    return content_root(fill(place, _ArchiveManifest, activity, extract))

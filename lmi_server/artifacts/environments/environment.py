"""Makes the environment of a recipe with uv, once: it is built beside its place, and renamed when it is complete.

An entry of the store is named after all that decides what is in it: the lines of the recipe, the content of the wheels
beside the model, and the interpreter. Models that ask for the same share it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lmi_server.artifacts.environments.recipe import Recipe, normalize_name
from lmi_server.artifacts.environments.room import SIZE, Lease, bytes_on_disk, lease, remove_unused
from lmi_server.artifacts.environments.uv import Uv
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.store import StoreEntry, digest_of, entry, file_errors, fill, read_errors
from lmi_server.contract.errors import ArtifactError, ConfigurationError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.sizes import in_words

logger = logging.getLogger(__name__)

FOLDER = "environments"
"""The folder of the directory of downloads that holds them."""
_CACHE = "uv-cache"
_PYTHON = Path("bin", "python")
_LONGEST_LIST = 1000  # characters of the requirements in messages, which end with uv's reason
_CLEANING_WAITS_S = "10"  # for an installation that uses the cache; uv's default of 300 would delay the model


class _Manifest(msgspec.Struct, frozen=True):
    """What was installed: the lines of the recipe, and the version of each package that they name."""

    requirements: tuple[str, ...]
    packages: dict[str, str]


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """An environment that a model uses. `packages` has the version of each package that its recipe names."""

    directory: str
    python: str
    packages: Mapping[str, str]
    lease: Lease


@dataclass(frozen=True, slots=True)
class EnvironmentMaker:
    """Makes environments below `root`; uv gets the variables of `environment`, and `limit_s` seconds.

    What no model uses may take `unused_bytes`. An installation ends if it leaves less than `keep_free` bytes of the
    disk free.
    """

    root: Path
    environment: Mapping[str, str]
    unused_bytes: int
    limit_s: float
    keep_free: int

    def prepare(self, recipe: Recipe, python: str, activity: Activity) -> EngineEnvironment:
        """Return the environment of `recipe` for the interpreter `python`; make it if it is not there.

        Raises ArtifactError with uv's reason, ConfigurationError without uv.
        """
        with read_errors():
            identity = "\0".join(_identity(recipe, python, activity))
        place = entry(self.root, FOLDER, identity, "env")
        held = lease(place.directory, activity)  # before it is looked for, so that no other server removes it meanwhile

        def make(lock: int) -> _Manifest:
            try:
                return self._make(recipe, python, place, lock, activity)
            except ArtifactError:
                is_full = shutil.disk_usage(self.root).free < self.keep_free
                if remove_unused(self.root / FOLDER, 0 if is_full else self.unused_bytes) or is_full:
                    self._clean_cache(activity)  # it has what uv has fetched for nothing
                raise

        files = fill(place, _Manifest, activity, make)
        manifest = place.manifest(_Manifest)
        assert manifest is not None, "fill has completed the entry"
        if remove_unused(self.root / FOLDER, self.unused_bytes):
            self._clean_cache(activity)  # it would keep the files
        return EngineEnvironment(str(files), str(files / _PYTHON), manifest.packages, held)

    def _make(self, recipe: Recipe, python: str, place: StoreEntry, lock: int, activity: Activity) -> _Manifest:
        about = f"{recipe.asked_by}: {excerpt(', '.join(recipe.requirements), _LONGEST_LIST)}"
        activity.report(f"making an environment for {about}")
        uv = Uv(self.environment, about, self.limit_s, activity, self.keep_free)
        of_pip, more = ({}, ()) if recipe.wheelhouse is not None else uv.settings_of_pip(python)
        variables = self._variables(of_pip)
        with file_errors(place.directory):
            given = _write(place.partial / "requirements.txt", recipe.requirements)
            instead = _write(place.partial / "overrides.txt", recipe.overrides)
        # --relocatable: the programs of the environment do not name the directory that it is built in.
        venv = ["venv", "--quiet", "--relocatable", "--python", python, str(place.partial_files)]
        uv.run(venv, variables, place.partial, (lock,))
        # --no-build: a package's source would run with the rights of the server before any worker does.
        install = ["pip", "install", "--no-build", "--python", str(place.partial_files / _PYTHON)]
        install += [*more, "--requirements", given, *(("--overrides", instead) if recipe.overrides else ())]
        if recipe.wheelhouse is not None:
            # Not the cache: it takes a wheel for the one of that name that it has seen there before. A URL, because uv
            # divides a path at "," and "#".
            install += ["--offline", "--no-index", "--no-cache", "--find-links", recipe.wheelhouse.as_uri()]
        uv.run(install, variables, place.partial, (lock,))
        return self._finish(recipe, place)

    def _finish(self, recipe: Recipe, place: StoreEntry) -> _Manifest:
        size = bytes_on_disk(place.partial_files)
        with file_errors(place.directory):
            (place.partial / SIZE).write_text(str(size), encoding="ascii")
        logger.info("made the environment %s: %s", place.directory, in_words(size))
        asked = frozenset(recipe.names)
        return _Manifest(
            recipe.requirements, dict(each for each in _installed_packages(place.partial_files) if each[0] in asked)
        )

    def _variables(self, of_pip: Mapping[str, str]) -> Mapping[str, str]:
        """Return what is set for uv; its cache is beside the environments, so that it shares files with them."""
        own_cache = {} if "UV_CACHE_DIR" in self.environment else {"UV_CACHE_DIR": str(self._cache)}
        return {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1", **own_cache, **of_pip}

    @property
    def _cache(self) -> Path:
        return self.root / FOLDER / _CACHE

    def _clean_cache(self, activity: Activity) -> None:
        if not self._cache.is_dir():
            return
        variables = {"UV_CACHE_DIR": str(self._cache), "UV_LOCK_TIMEOUT": _CLEANING_WAITS_S}
        try:
            uv = Uv(self.environment, "uv's cache", self.limit_s, activity)
            uv.run(["cache", "clean", "--quiet"], variables, self.root)
        except (ArtifactError, ConfigurationError) as error:  # the environment of this model is complete nevertheless
            logger.warning("%s; it is cleaned with the next removal", error.message)


def _installed_packages(environment: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and version of each package, as the folders of their metadata are called.

    The metadata is not read: a wheel brings as much of it as it likes.
    """
    for found in environment.glob("lib/python3*/site-packages/*-*.dist-info"):
        name, _, version = found.name.removesuffix(".dist-info").rpartition("-")
        yield normalize_name(name), version


def _write(path: Path, lines: Sequence[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def _identity(recipe: Recipe, python: str, activity: Activity) -> Iterator[str]:
    """Yield the texts that decide what is installed. Raises OSError if a wheel or the interpreter is not there."""
    yield from sorted(recipe.requirements)
    yield "overrides"
    yield from sorted(recipe.overrides)
    interpreter = Path(python).resolve()
    yield f"{interpreter}\0{interpreter.stat().st_mtime_ns}"
    if recipe.wheelhouse is None:
        return
    yield "wheelhouse"  # an empty one is not an index: nothing can be installed from it
    for wheel in sorted(recipe.wheelhouse.glob("*.whl")):
        if not wheel.is_file():  # a pipe, which would be waited for, or a device without an end
            continue
        yield f"{wheel.name}\0{digest_of(wheel, activity)}"

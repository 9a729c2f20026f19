"""Makes the directory that brings the code of a worker to another interpreter than the server's.

It has the server's own packages as links, and what says which plugins they bring: vLLM calls one in each of its
processes, and finds it as it finds those of installed packages. The directory that the server's packages are installed
in would bring all others along.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from lmi_server.artifacts.store import file_errors, importable

_PACKAGES = ("lmi_server", "handlers")
_PROJECT = "lmi-server"
_ABOUT = "lmi_server-0.dist-info"


def worker_code(root: Path) -> Path:
    """Return the directory, which is in the directory of downloads `root`. Other servers may make it at the same time.

    Raises ArtifactError if it cannot be written, ConfigurationError if Python cannot have it on its path.
    """
    sources = {name: _directory_of(name) for name in _PACKAGES}
    about = _about_the_project()
    identity = "\0".join((*sources.values(), *about.values()))
    directory = importable(root / "worker-code" / hashlib.sha256(identity.encode()).hexdigest()[:20])
    with file_errors(directory):
        (directory / _ABOUT).mkdir(parents=True, exist_ok=True)
        for path, source in ((directory / name, source) for name, source in sources.items()):
            if not path.exists():
                with _in_one_step(path) as partial:
                    partial.symlink_to(source)
        for path, text in ((directory / _ABOUT / name, text) for name, text in about.items()):
            if not path.exists():
                with _in_one_step(path) as partial:
                    partial.write_text(text, encoding="utf-8")
    return directory


def _about_the_project() -> Mapping[str, str]:
    """Return the files that say which plugins this project has, by name; none if it is not installed."""
    try:
        found = distribution(_PROJECT)
    except PackageNotFoundError:
        return {}
    name_and_version = f"Metadata-Version: 2.1\nName: {_PROJECT}\nVersion: {found.version}\n"
    return {"METADATA": name_and_version, "entry_points.txt": found.read_text("entry_points.txt") or ""}


def _directory_of(package: str) -> str:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations, package
    return next(iter(spec.submodule_search_locations))


@contextmanager
def _in_one_step(path: Path) -> Iterator[Path]:
    """Yield the path to make something at, which then takes its place at `path`."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}")
    partial.unlink(missing_ok=True)
    yield partial
    partial.replace(path)

"""The distributions of this project, built once for all tests that install them, and an environment for those."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from fresh_environments import SharedEnvironment, build


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the sdist and the wheel that is built from it, which all processes of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "distributions"
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return find_distributions(directory) or build(directory)


@pytest.fixture(scope="session")
def shared_environment(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> SharedEnvironment:
    """Return the environment out of which each test takes what it does not need."""
    return SharedEnvironment(tmp_path_factory.mktemp("shared"), distributions[1])


def find_distributions(directory: Path) -> tuple[Path, Path] | None:
    """Return what another process has built, None if none has."""
    sdists, wheels = list(directory.glob("*.tar.gz")), list(directory.glob("*.whl"))
    return (sdists[0], wheels[0]) if sdists and wheels else None

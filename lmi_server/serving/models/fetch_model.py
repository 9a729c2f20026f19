"""Makes a model that can be started from a model directory: reads its configuration and fetches its files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_server.artifacts.environments.environment import EngineEnvironment
from lmi_server.artifacts.fetch import ArtifactSettings, empty_directory, fetch_artifacts, fetch_model_directory
from lmi_server.artifacts.interpreter import WorkerPython
from lmi_server.artifacts.location import GgufFile, HubModel, Location
from lmi_server.artifacts.own_thread import in_own_thread
from lmi_server.artifacts.progress import OnProgress
from lmi_server.configuration.checks.secure_mode import secure_mode
from lmi_server.configuration.choice.engine_recipe import engine_recipe
from lmi_server.configuration.resolve import Inspection, ResolvedModel, inspect_model
from lmi_server.contract.errors import ConfigurationError

_INSPECTION_S = 300.0
Inspect = Callable[[Path, Mapping[str, str], Mapping[str, str]], Inspection]


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model whose `option.model_id` is a local directory, the interpreter of its workers, and their PYTHONPATH.

    `environment` is that of its engine, if the model has one of its own.
    """

    resolved: ResolvedModel
    python: str
    python_path: tuple[str, ...]
    environment: EngineEnvironment | None = None


async def fetch_directory(
    location: Location, url: str, settings: ArtifactSettings, on_progress: OnProgress
) -> tuple[Path, Mapping[str, str]]:
    """Fetch the model directory at `url`, whose parsed form is `location`; return it with settings of the model.

    A model of the Hugging Face Hub, and a file in GGUF, is an empty directory whose option.model_id names the weights:
    the server takes no code and no serving.properties from the Hub. Raises ArtifactError.
    """
    if isinstance(location, HubModel | GgufFile):
        model_id = location.id if isinstance(location, HubModel) else str(location.path)
        return await asyncio.to_thread(empty_directory, settings), {"option.model_id": model_id}
    return await fetch_model_directory(url, settings, on_progress=on_progress), {}


async def fetch_model(
    model_dir: Path,
    environment: Mapping[str, str],
    registration: Mapping[str, str],
    settings: ArtifactSettings,
    *,
    inspect: Inspect = inspect_model,
    on_progress: OnProgress = lambda progress: None,
) -> FetchedModel:
    """Resolve the model in `model_dir`, fetch its weights and install its requirements.

    The configuration is read before the download, to report its errors without one. If weights were fetched it is read
    again, because much depends on the config.json that came with them. Raises ConfigurationError and ArtifactError.
    """
    found = await _inspect(inspect, model_dir, environment, registration)
    if found.problems or found.unavailable:
        raise ConfigurationError.from_problems((*found.problems, *found.unavailable))
    artifacts = await fetch_artifacts(
        model_dir,
        found.location,
        settings,
        revision=found.options.revision,
        python=_worker_python(found),
        code_dir=_code_dir(found),
        limit_s=found.options.model_loading_timeout,
        on_progress=on_progress,
    )
    fetched = [model_dir] if model_dir.is_relative_to(settings.root) else []
    if artifacts.model_id != found.location:
        registration = {**registration, "option.model_id": artifacts.model_id}
        found = await _inspect(inspect, model_dir, environment, registration)
        fetched.append(Path(artifacts.model_id))
    await in_own_thread(_refuse_unsafe_files, fetched, environment)
    return FetchedModel(found.resolved(), artifacts.python, artifacts.python_path, artifacts.environment)


async def _inspect(
    inspect: Inspect, model_dir: Path, environment: Mapping[str, str], registration: Mapping[str, str]
) -> Inspection:
    """Return what `inspect` finds. Raises ConfigurationError if a file cannot be read to its end: it may be a pipe."""
    try:
        async with asyncio.timeout(_INSPECTION_S):
            return await in_own_thread(inspect, model_dir, environment, registration)
    except TimeoutError:
        raise ConfigurationError(
            f"{model_dir}: the configuration could not be read within {_INSPECTION_S:g} seconds; look for files that"
            " are pipes, or on a disk that does not answer"
        ) from None


def _refuse_unsafe_files(fetched: Sequence[Path], environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError if secure mode forbids a file that was fetched.

    SageMaker's list of untrusted channels cannot have these directories, because the server has just made them.
    """
    secure = secure_mode(environment)
    problems = [] if secure is None else list(secure.file_problems(fetched))
    if problems:
        raise ConfigurationError.from_problems(problems)


def _code_dir(found: Inspection) -> Path:
    """Return where the requirements of the model are: with a script for SageMaker's framework containers, beside it."""
    entry_point = found.sources["option.entryPoint"]
    of_files = entry_point.layer == "model directory"
    return Path(found.model_dir, entry_point.raw).parent if of_files else Path(found.model_dir)


def _worker_python(found: Inspection) -> WorkerPython:
    modules = [name.partition(":")[0] for name in (found.spec.handler, found.spec.options) if name is not None]
    options = found.options
    recipe = engine_recipe(found.engine, Path(found.model_dir), found.machine)
    return WorkerPython(options.own_python, options.enable_venv, found.engine.packages, tuple(modules), recipe)

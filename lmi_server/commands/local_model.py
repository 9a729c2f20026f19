"""Brings the model of an argument to this machine, for commands that only read its files."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lmi_server.artifacts.fetch import ArtifactSettings, artifact_settings, fetch_artifacts
from lmi_server.artifacts.location import HubModel, names_model_file, parse_location
from lmi_server.artifacts.progress import show_progress
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.contract.errors import ArtifactError, ConfigurationError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.machine.inventory import Machine
from lmi_server.serving.models.fetch_model import fetch_directory
from lmi_server.serving.models.model_store import ModelSource, is_spec, named_source


def local_model(argument: str, environment: Mapping[str, str]) -> ModelSource:
    """Return the model that `argument` names, with a local directory as its URL.

    `argument` is what `lmi-server serve` takes. Files that are not on this machine are fetched into the caches of a
    server, for the server to find. Raises ConfigurationError.
    """
    source = named_source(argument)
    try:
        if not is_spec(argument) and not Path(source.url).is_file() and not names_model_file(source.url):
            return source  # a directory; if it is missing, the reader of its configuration says so
    except OSError as error:  # such as a name that is too long for the file system
        raise ConfigurationError(f'model "{excerpt(source.url)}" cannot be looked up: {error.strerror}') from error
    try:
        return asyncio.run(_fetch(source, environment, artifact_settings(None, environment)))
    except ValueError as error:
        raise ConfigurationError(f'model "{excerpt(SECRETS.mask(source.url), 200)}" {error}') from error
    except ArtifactError as error:
        raise ConfigurationError(error.message) from error


async def _fetch(source: ModelSource, environment: Mapping[str, str], artifacts: ArtifactSettings) -> ModelSource:
    location = parse_location(source.url, Path.cwd())
    with show_progress(source.label, sys.stderr) as on_progress:
        directory, more = await fetch_directory(location, source.url, artifacts, on_progress)
        local = replace(source, url=str(directory), settings={**source.settings, **more})
        if not isinstance(location, HubModel):
            return local
        revision = inspect_local(local, environment).options.revision
        weights = await fetch_artifacts(directory, location.id, artifacts, revision=revision, on_progress=on_progress)
    return replace(local, settings={**local.settings, "option.model_id": weights.model_id})


def inspect_local(source: ModelSource, environment: Mapping[str, str], machine: Machine | None = None) -> Inspection:
    """Read and check the configuration of a model that `local_model` returned. Raises ConfigurationError."""
    found = inspect_model(Path(source.url), {**environment, **source.variables}, source.settings, machine)
    return replace(found, name=source.name)

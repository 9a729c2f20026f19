"""Splits or quantises the weights of a model ahead of time: `lmi-server partition`.

The workers of the model load it once and write the weights as they hold them (option.save_mp_checkpoint_path). The
result is another model directory. A server that starts with it only loads the weights.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import uvloop

from lmi_server.artifacts.fetch import ArtifactSettings, artifact_settings
from lmi_server.commands.local_model import inspect_local
from lmi_server.configuration.choice.model_layers import SERVING_PROPERTIES
from lmi_server.configuration.properties import decode_properties, edited_properties
from lmi_server.configuration.resolve import Inspection, ResolvedModel, inspect_model
from lmi_server.contract.errors import ConfigurationError
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.registry import ModelRegistry

logger = logging.getLogger(__name__)

_SAVE = "option.save_mp_checkpoint_path"
# Files of the original weights: the new directory has its own.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")


def partition(model: ModelSource, target: Path, environment: Mapping[str, str]) -> None:
    """Write the local `model` to `target`, with its weights as the workers hold them.

    Raises ConfigurationError if there is nothing to split or quantise or if `target` is taken, LmiServerError if the
    model cannot be loaded. In each case `target` does not exist afterwards.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"--save {target}: exists already; name a new directory")
    found = inspect_local(model, environment)
    changes = _changes(found)
    # Beside the target, so that the rename at the end stays on one file system, and is atomic.
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    one_worker = {"minWorkers": "1", "maxWorkers": "1"}
    if found.spec.devices(found.machine)[1]:
        one_worker["load_on_devices"] = "0"  # the first device set: one worker, on as many devices as it needs
    settings = {_SAVE: str(partial.absolute()), **one_worker}
    source = replace(model, name="model", settings={**model.settings, **settings})
    try:
        resolved = uvloop.run(_load(source, environment, artifact_settings(None, environment)))
        _complete(partial, resolved, changes)
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("%s: %.1f MiB, ready to be served", target, _bytes(target) / 2**20)


def _changes(found: Inspection) -> Mapping[str, str | None]:
    """Return the changes to serving.properties, by key in full; None removes a key. Raises ConfigurationError."""
    found.resolved()
    changes = found.engine.partition(found.config)
    if isinstance(changes, str):
        raise ConfigurationError(f"{found.location}: nothing to split or quantise ahead of time: {changes}")
    return changes


async def _load(source: ModelSource, environment: Mapping[str, str], artifacts: ArtifactSettings) -> ResolvedModel:
    models = ModelRegistry(environment, artifacts, inspect_model, drain_timeout_s=0.0, log_level="INFO")
    try:
        model = await models.register_and_load(source)
        assert model.resolved is not None, "it is loaded"
        return model.resolved
    finally:
        await models.stop()


def _complete(partial: Path, resolved: ResolvedModel, changes: Mapping[str, str | None]) -> None:
    """Add all other files of the model to the weights, and the changed serving.properties."""
    model_dir = Path(resolved.model_dir)
    written = {path.parent.relative_to(partial) for path in partial.rglob("*") if path.is_file()} | {Path()}
    for origin in (model_dir, Path(resolved.options.model_id or model_dir)):
        for path in _other_files(origin, written):
            copy = partial / path.relative_to(origin)
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    properties = model_dir / SERVING_PROPERTIES
    text = decode_properties(properties.read_bytes(), str(properties))[0] if properties.is_file() else ""
    (partial / SERVING_PROPERTIES).write_text(edited_properties(text, changes), encoding="utf-8")


def _other_files(origin: Path, written: Collection[Path]) -> Iterator[Path]:
    """Yield the files of a model, but for the weights of the folders that the load has `written`."""
    for path in sorted(origin.rglob("*")):
        place = path.relative_to(origin)
        hidden = any(part.startswith(".") for part in place.parts)
        is_weights = place.parent in written and path.name.endswith(_WEIGHTS)
        if path.is_file() and not hidden and not is_weights and path.name != SERVING_PROPERTIES:
            yield path


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

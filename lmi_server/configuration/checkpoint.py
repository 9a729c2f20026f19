"""What the files of a model directory say about the model, as far as the configuration needs to know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_server.artifacts.location import HubModel, LocalArchive, LocalDirectory, S3Location, parse_location
from lmi_server.contract.errors import ConfigurationError

_CAUSAL_LM = ("ForCausalLM", "LMHeadModel")


def locate_model(model_id: str | None, model_dir: Path) -> str:
    """Return the absolute path of the model (a directory or an archive), its Hugging Face id, or its s3:// address.

    A relative path is relative to `model_dir`; without a `model_id` the model is `model_dir` itself. Raises ValueError
    with what is wrong.
    """
    if model_id is None:
        return str(model_dir)
    match parse_location(model_id, model_dir):
        case LocalDirectory(path) | LocalArchive(path):
            return str(path)
        case HubModel(repo_id):
            return repo_id
        case S3Location() as location:
            return location.url


def read_config(location: str) -> Mapping[str, Any]:
    """Return config.json in directory `location`; empty where it is not on this machine.

    Raises ConfigurationError where it is not a JSON object.
    """
    path = Path(location) / "config.json"
    if not path.is_absolute() or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: is not a JSON object")
    return config


def architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the architectures that `config` names; none where it does not say."""
    return tuple(str(name) for name in (*(config.get("architectures") or ()), *(config.get("auto_map") or ())))


def is_causal_lm(names: tuple[str, ...]) -> bool:
    """Tell whether one of the architectures generates text token by token from a prompt of the same sequence."""
    return any(name.endswith(_CAUSAL_LM) for name in names)

"""What the files of a model directory say about the model, as far as the configuration needs to know."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from lmi_server.errors import ConfigurationError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CAUSAL_LM = ("ForCausalLM", "LMHeadModel")


def locate_model(model_id: str | None, model_dir: Path) -> str:
    """Return the absolute path of the model, or its Hugging Face id.

    A relative path is relative to `model_dir`; without a `model_id` the model is `model_dir` itself. Raises ValueError
    with what is wrong.
    """
    if model_id is None:
        return str(model_dir)
    if "://" in model_id:
        raise ValueError("is not available in this version; use a local directory or the id of a Hugging Face model")
    local = os.path.abspath(model_dir / model_id)  # an absolute model_id replaces model_dir
    if os.path.isdir(local):
        return local
    if _HUB_ID.fullmatch(model_id) is None:
        raise ValueError(f"is not allowed; there is no directory {local}, nor is it the id of a Hugging Face model")
    return model_id


def architectures(location: str) -> tuple[str, ...]:
    """Return the architectures that config.json in directory `location` names; none where it does not say.

    Raises ConfigurationError where config.json is not a JSON object.
    """
    path = Path(location) / "config.json"
    if not path.is_file():
        return ()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: is not a JSON object")
    return tuple(str(name) for name in (*(config.get("architectures") or ()), *(config.get("auto_map") or ())))


def is_causal_lm(names: tuple[str, ...]) -> bool:
    """Tell whether one of the architectures generates text token by token from a prompt of the same sequence."""
    return any(name.endswith(_CAUSAL_LM) for name in names)

"""Reads from the files of a model what the configuration needs: its location and its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_server.artifacts.location import (
    GgufFile,
    HubModel,
    LocalArchive,
    LocalDirectory,
    LocalModelFile,
    S3Location,
    parse_location,
)
from lmi_server.configuration.model_directory.gguf import gguf_files, is_gguf, read_gguf
from lmi_server.configuration.tasks import infer_task
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.regular_files import read_regular

_POINTER = b"version https://git-lfs"
IS_POINTER = "is a pointer of Git LFS and not the file itself; run git lfs pull where it was cloned"
MAX_HEADER_BYTES = 100_000_000
"""Of a file in safetensors, by its format."""
_CAUSAL_LM = ("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "GenerationDecoder")
# Of models that read images too; transformers loads them as causal language models.
_CAUSAL_LM_BY_NAME = frozenset(
    f"{family}ForConditionalGeneration" for family in ("Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified")
)

READS_MORE = "ForConditionalGeneration"
"""How the names of most models end that read images or sounds beside text, and of some that have tasks of their own."""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What the files of a model say.

    - `directory`: the model directory; `holds_config`: it has a config.json itself.
    - `location`: where the weights are: a directory or a file, a Hugging Face id or an s3:// address.
    - `config`: config.json, or what it would say of a file in GGUF; empty if the weights are not on this machine.
    """

    directory: Path
    holds_config: bool
    location: str
    config: Mapping[str, Any]

    @property
    def weights(self) -> Path | None:
        """Return the directory or file of the weights; None if they are not on this machine."""
        path = Path(self.location)
        return path if path.is_absolute() else None

    @property
    def in_gguf(self) -> bool:
        return is_gguf(self.location)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Return the architectures that config.json names; empty if they are unknown."""
        names = (*(self.config.get("architectures") or ()), *(self.config.get("auto_map") or ()))
        return tuple(map(str, names))

    @property
    def task(self) -> str | None:
        """Return the task that follows from the files; None if it is unknown."""
        return infer_task(self.architectures, self.location)


def locate_model(model_id: str | None, model_dir: Path) -> str:
    """Return the absolute path of the model (a directory, an archive or a file), its Hugging Face id or s3:// address.

    A relative path is relative to `model_dir`; without a `model_id` the model is `model_dir` itself, or the one file in
    GGUF that it holds instead of a config.json. Raises ValueError if `model_id` names nothing; its text follows
    "model_id = ..." in a message.
    """
    if model_id is None:
        return _own_model(model_dir)
    match parse_location(model_id, model_dir):
        case LocalDirectory(path):
            return _own_model(path)
        case LocalArchive(path) | GgufFile(path):
            return str(path)
        case LocalModelFile():
            raise ValueError("is not allowed; a model file holds no weights; name it in place of the model directory")
        case HubModel() as model:
            return model.id
        case S3Location() as location:
            return location.url


def _own_model(directory: Path) -> str:
    in_gguf = [] if (directory / "config.json").is_file() else gguf_files(directory)
    return str(in_gguf[0] if len(in_gguf) == 1 else directory)


def read_config(location: str) -> Mapping[str, Any]:
    """Return config.json in directory `location`, or what it would say of a file in GGUF; empty if neither is here.

    Raises ConfigurationError if it is not a JSON object.
    """
    path = Path(location) if is_gguf(location) else Path(location) / "config.json"
    if not path.is_absolute() or not (path.is_file() or is_gguf(location)):
        return {}
    try:
        if path.is_file() and is_pointer(path):
            raise ConfigurationError(f"{path}: {IS_POINTER}")
        if is_gguf(location):
            return read_gguf(path).config()
        config = json.loads(read_regular(path))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: is not a JSON object")
    return config


def is_pointer(path: Path) -> bool:
    """Return whether a file only says where Git LFS has the real one."""
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def is_causal_lm(names: tuple[str, ...]) -> bool:
    """Return True if one of the architectures is a causal language model, such as LlamaForCausalLM."""
    return any(name.endswith(_CAUSAL_LM) or name in _CAUSAL_LM_BY_NAME for name in names)

"""Loads the whole model that a manifest of DeepSpeed lists the files of (option.checkpoint)."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from handlers.deepspeed.manifest import WholeModel, manifest_problem, read_manifest
from handlers.deepspeed.options import DeepSpeedOptions
from lmi_server.configuration.options import LONG_DTYPES
from lmi_server.contract.errors import ModelLoadError, describe

_DAMAGED = (AssertionError, AttributeError, LookupError, TypeError, struct.error)
"""What torch.load raises, beside errors that say so, if bytes of a file were changed."""


def load_whole_model(auto_class: Any, path: str, config: Any, options: DeepSpeedOptions) -> Any | None:
    """Return the model in option.checkpoint's files, on the CPU; None if the option names none, or weights by rank.

    Raises ModelLoadError if a file cannot be read, or if the files lack weights of the model.
    """
    if options.checkpoint is None:
        return None
    manifest = Path(path) / options.checkpoint
    content = read_manifest(manifest)  # `find_shards` has refused what cannot be read
    if not isinstance(content, WholeModel):
        return None
    problem = manifest_problem(manifest, 1)
    if problem is not None:
        raise ModelLoadError(f"option.checkpoint: {problem}")
    weights: dict[str, torch.Tensor] = {}
    for name in content.files:
        weights |= _tensors(manifest.parent / name)
    named = LONG_DTYPES.get(options.dtype) or content.dtype
    dtype = "auto" if named is None else getattr(torch, named)
    model, found = _class(auto_class, config).from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"option.checkpoint: the files of {manifest} lack {missing[0]}; name all files of the model"
        )
    model.requires_grad_(False)
    return model.eval()


def _class(auto_class: Any, config: Any) -> Any:
    """Return the class of the model: the auto class reads the files of a directory, even if it gets weights."""
    known = auto_class._model_mapping
    if type(config) not in known:  # code of the model itself, which is read with the directory
        raise ModelLoadError(
            f"option.checkpoint: transformers has no class for model_type={config.model_type!r}; remove the key to load"
            " the model's original weights"
        )
    return known[type(config)]


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; a pickle may hold tensors alone."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to run whatever the file says
        raise ModelLoadError(
            f"option.checkpoint: {path} is damaged, or holds more than tensors; fetch it again, or convert it to"
            " safetensors"
        ) from error
    except (*_DAMAGED, OSError, RuntimeError, ValueError, EOFError, SafetensorError) as error:
        raise ModelLoadError(f"option.checkpoint: {path} cannot be read: {describe(error)}; fetch it again") from error
    tensors = found.get("module", found) if isinstance(found, dict) else {}
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ModelLoadError(f"option.checkpoint: {path} holds more than tensors by their names; name weights alone")
    return tensors

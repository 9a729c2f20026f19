"""Loads what a Hugging Face checkpoint holds, in the data type and on the device that the options say."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from handlers.transformers_options import TransformersOptions
from lmi_server.errors import ModelLoadError

_log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load_tokenizer(path: str, options: TransformersOptions) -> Any:
    return from_pretrained(AutoTokenizer, path, **origin(options))


def load_config(path: str, options: TransformersOptions) -> Any:
    return from_pretrained(AutoConfig, path, **origin(options))


def load_model(auto_class: Any, path: str, options: TransformersOptions) -> Any:
    """Load a model for inference: on the worker's GPU where it has one, unless option.device_map says otherwise.

    Raises ModelLoadError.
    """
    model = from_pretrained(
        auto_class, path, dtype=dtype_for(load_config(path, options), options), **origin(options), **placement(options)
    )
    model.requires_grad_(False)
    return model.eval()


def placement(options: TransformersOptions) -> dict[str, str]:
    """Return where the model goes, as `from_pretrained` takes it; nothing for the CPU."""
    if options.device_map:
        return {"device_map": options.device_map}
    return {"device_map": "cuda"} if torch.cuda.is_available() else {}


def dtype_for(config: Any, options: TransformersOptions) -> torch.dtype | str:
    """Return the data type to load in; "auto" is the checkpoint's own."""
    if options.dtype in _DTYPES:
        return _DTYPES[options.dtype]
    if not placement(options) and getattr(config, "dtype", None) == torch.float16:
        _log.warning("the checkpoint is fp16, which the CPU has no kernels for: loading as bf16; set option.dtype=fp32")
        return torch.bfloat16
    return "auto"


def set_threads(options: TransformersOptions) -> None:
    """Let torch use as many threads inside an operation as the options say."""
    if options.threads:
        torch.set_num_threads(options.threads)


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a text."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)


def from_pretrained(loader: Any, path: str, **arguments: Any) -> Any:
    try:
        return loader.from_pretrained(path, **arguments)
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # what transformers raises for a broken directory
        raise ModelLoadError(f"{loader.__name__} cannot load {path}: {error}") from error


def origin(options: TransformersOptions) -> dict[str, Any]:
    """Return which version of a checkpoint is meant, and whether its own code may run."""
    return {"revision": options.revision, "trust_remote_code": options.trust_remote_code}

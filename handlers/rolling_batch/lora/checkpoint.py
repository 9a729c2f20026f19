"""Reads a LoRA adapter as peft writes it, and refuses by name the features that the rolling batch does not compute."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from peft.utils import load_peft_weights
from peft.utils.other import get_pattern_key

from handlers.checkpoints.adapter_layers import DOWN, PREFIX, UP, adapted_layers
from handlers.rolling_batch.lora.layers import LoraPair
from lmi_server.contract.errors import RequestError

# peft saves these beside the adapter of such a layer by default, as the model itself has them.
_OF_THE_MODEL = (".lm_head.base_layer.weight", ".embed_tokens.base_layer.weight")
_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# Fields of a LoraConfig that say how the adapter was trained, where its weights belong (their names say it, too), or
# how they are scaled. Every other field must have its default, because it changes what the model computes.
_UNDERSTOOD = frozenset(
    {
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "target_modules",
        "exclude_modules",
        "lora_alpha",
        "lora_dropout",
        "fan_in_fan_out",
        "use_rslora",
        "init_lora_weights",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
    }
)
# How training began. Any other way also changes the weights of the model, which other requests share.
_HARMLESS_STARTS = (True, False, "gaussian", "orthogonal", "eva")


def read_adapter(directory: str) -> dict[str, LoraPair]:
    """Return the matrices of the adapter in `directory`, by the name of the linear layer.

    Raises RequestError naming what is missing, broken or not supported.
    """
    config = _read_config(Path(directory))
    _refuse_unsupported(config)
    weights = _read_weights(Path(directory))
    for name in weights:
        if not name.endswith((DOWN, UP)) or not name.startswith(PREFIX):
            raise RequestError(f"the adapter holds {name}, which is not supported; only LoRA of linear layers is")
    if not weights:
        raise RequestError(f"the adapter in {directory} holds no weights")
    layers = adapted_layers({name: tensor.shape for name, tensor in weights.items()})
    return {layer: _pair(layer, weights, config) for layer in layers}


def _read_config(directory: Path) -> LoraConfig:
    if not (directory / "adapter_config.json").is_file():
        raise RequestError(f"{directory} holds no adapter_config.json; a LoRA adapter is a directory as peft saves it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's hints for training
            config = PeftConfig.from_pretrained(str(directory))
    except (OSError, ValueError, TypeError, KeyError) as error:  # what peft raises for a broken file
        raise RequestError(f"adapter_config.json of {directory} cannot be read: {error}") from error
    if not isinstance(config, LoraConfig):
        raise RequestError(f"peft_type = {config.peft_type} is not supported; only LORA is")
    return config


def _refuse_unsupported(config: LoraConfig) -> None:
    defaults = LoraConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in _UNDERSTOOD and value and value != getattr(defaults, field.name):
            raise RequestError(
                f"the adapter's {field.name} = {value!r} is not supported; train it without, or merge it into the model"
            )
    if config.init_lora_weights not in _HARMLESS_STARTS:
        raise RequestError(
            f"the adapter's init_lora_weights = {config.init_lora_weights!r} is not supported, because it changes the"
            " model's own weights; save it with peft's path_initial_model_for_weight_conversion"
        )


def _read_weights(directory: Path) -> Mapping[str, torch.Tensor]:
    if not any((directory / name).is_file() for name in _WEIGHT_FILES):
        raise RequestError(f"{directory} holds none of {', '.join(_WEIGHT_FILES)}")
    try:
        weights = load_peft_weights(str(directory), device="cpu")
    # The border to files that anybody may have written: safetensors and torch raise many kinds of errors.
    except Exception as error:
        raise RequestError(f"the weights in {directory} cannot be read: {type(error).__name__}: {error}") from error
    return {name: tensor for name, tensor in weights.items() if not name.endswith(_OF_THE_MODEL)}


def _pair(layer: str, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> LoraPair:
    down, up = (weights[f"{PREFIX}{layer}{kind}"] for kind in (DOWN, UP))
    return LoraPair(down, up, _scaling(layer, down.shape[0], config))


def _scaling(layer: str, rank: int, config: LoraConfig) -> float:
    alphas: Mapping[str, Any] = config.alpha_pattern or {}
    alpha = alphas.get(get_pattern_key(list(alphas), layer), config.lora_alpha)
    return float(alpha) / (rank**0.5 if config.use_rslora else rank)

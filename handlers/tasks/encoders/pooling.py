"""Pools the hidden states of a text's tokens to one vector, as the files of sentence-transformers describe.

modules.json lists the steps after the model: Pooling, then optional Dense layers and Normalize.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lmi_server.contract.errors import ModelLoadError

Vectors: TypeAlias = torch.Tensor  # (texts, width)
_Pool: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Vectors]
"""Takes states (texts, tokens, width) and a mask (texts, tokens) that is False at padding, which is on the right."""


def _weighted_mean(states: torch.Tensor, mask: torch.Tensor) -> Vectors:
    """Weight a token by its position: in a causal model, later tokens have seen more of the text."""
    weights = mask.cumsum(1) * mask
    return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def _sum(states: torch.Tensor, mask: torch.Tensor) -> Vectors:
    return (states * mask[..., None]).sum(1)


_POOLS: Mapping[str, _Pool] = {
    "cls": lambda states, mask: states[:, 0],
    "max": lambda states, mask: states.masked_fill(~mask[..., None], -torch.inf).amax(1),
    "mean": lambda states, mask: _sum(states, mask) / mask.sum(1, keepdim=True),
    "mean_sqrt_len_tokens": lambda states, mask: _sum(states, mask) / mask.sum(1, keepdim=True).sqrt(),
    "weightedmean": _weighted_mean,
    "lasttoken": lambda states, mask: states[torch.arange(len(states), device=states.device), mask.sum(1) - 1],
}
# The flags of older files, in the order in which sentence-transformers concatenates several poolings.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class Layout:
    """The content of sentence-transformers' files: poolings, layers after them, and how texts are prepared."""

    pooling: tuple[str, ...] = ("mean",)
    dense: tuple[Path, ...] = ()
    max_length: int | None = None
    lower_case: bool = False
    prompt: str = ""  # a prefix of every text


def read_layout(directory: Path) -> Layout:
    """Return the layout of the model in `directory`; the default one if it has no such files.

    Raises ModelLoadError for modules and poolings that this version does not support.
    """
    modules = _read(directory / "modules.json", [])
    pooling: tuple[str, ...] = ("mean",)
    dense: list[Path] = []
    for module in modules:
        kind, path = str(module["type"]).rpartition(".")[2], directory / str(module["path"])
        if kind == "Pooling":
            pooling = _pooling_of(_read(path / "config.json", {}), path)
        elif kind == "Dense":
            dense.append(path)
        elif kind not in ("Transformer", "Normalize"):
            raise ModelLoadError(f"{directory / 'modules.json'}: a module {kind} is not supported")
    settings = _read(directory / "sentence_bert_config.json", {})
    return Layout(
        pooling,
        tuple(dense),
        settings.get("max_seq_length"),
        bool(settings.get("do_lower_case", False)),
        _default_prompt(_read(directory / "config_sentence_transformers.json", {})),
    )


def _read(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from error


def _pooling_of(config: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    if not config.get("include_prompt", True):
        raise ModelLoadError(f"{path}: include_prompt=false is not supported")
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or ())
    modes = modes or [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    for mode in modes:
        if mode not in _POOLS:
            raise ModelLoadError(f"{path}: pooling {mode} is not supported; known are {', '.join(_POOLS)}")
    return tuple(modes)


def _default_prompt(config: Mapping[str, Any]) -> str:
    prompts, name = config.get("prompts") or {}, config.get("default_prompt_name")
    return str(prompts.get(name, "")) if name else ""


class Pooler:
    """Computes vectors from hidden states."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._pools = [_POOLS[mode] for mode in layout.pooling]
        self._dense = [_dense(path).to(device) for path in layout.dense]

    def __call__(self, states: torch.Tensor, mask: torch.Tensor) -> Vectors:
        """Return float32 vectors (texts, width), not normalised."""
        vectors = torch.cat([pool(states.float(), mask) for pool in self._pools], dim=1)
        for layer in self._dense:
            vectors = layer(vectors)
        return vectors


def _dense(path: Path) -> torch.nn.Module:
    config = _read(path / "config.json", {})
    linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    weights = {name.removeprefix("linear."): tensor.float() for name, tensor in _weights(path).items()}
    linear.load_state_dict(weights)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid"):
        raise ModelLoadError(f"{path}: activation function {name} is not supported")
    return torch.nn.Sequential(linear, getattr(torch.nn, name)()).requires_grad_(False).eval()


def _weights(path: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    if (path / "model.safetensors").is_file():
        return load_file(path / "model.safetensors")
    return torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True)  # type: ignore[no-any-return]

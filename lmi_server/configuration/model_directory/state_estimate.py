"""Estimates the states that recurrent layers keep of a sequence, from config.json.

The names are those of transformers' configurations: Mamba and its relatives, gated delta nets (Qwen3-Next, Qwen3.5,
OLMo hybrid), Kimi Linear, LFM2's short convolutions, RecurrentGemma, and MiniMax's lightning attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

_MAX_LAYERS = 1000  # of a model whose layers are looked at one by one; config.json may claim any number
_STATE_BYTES = 4  # of an element of a recurrence, which most architectures keep in float32
_RECURRENT = {"conv", "linear_attention", "mamba", "recurrent"}
_BOTH = {"hybrid", "hybrid_sliding"}
_NEITHER = {"moe", "mlp"}


class LayerCounts(NamedTuple):
    """How many layers attend, and how many keep a state; a layer may do both."""

    attending: int
    recurrent: int


def layer_counts(text: Mapping[str, Any], layers: int) -> LayerCounts:
    """Return the kinds of `layers` layers of a model with the configuration `text`."""
    if layers > _MAX_LAYERS or _elements(text) is None:
        return LayerCounts(layers, 0)
    named = (text.get(name) for name in ("layer_types", "layers_block_type", "block_types"))
    kinds = next((kinds for kinds in named if kinds), None) or _kinds_by_rule(text, layers)
    if not isinstance(kinds, list):
        return LayerCounts(layers, 0)
    kinds = [str(kind) for kind in kinds]
    if text.get("model_type") == "recurrent_gemma":  # its short list of kinds repeats
        kinds = list(itertools.islice(itertools.cycle(kinds), layers))
    recurrent = sum(kind in _RECURRENT | _BOTH for kind in kinds)
    return LayerCounts(sum(kind not in _RECURRENT | _NEITHER for kind in kinds), recurrent)


def state_bytes(text: Mapping[str, Any], layers: int, width: int) -> int:
    """Return the bytes of the states of one sequence, whose convolutions have elements of `width` bytes."""
    elements = _elements(text)
    if elements is None:
        return 0
    convolved, recurrent = elements
    return layer_counts(text, layers).recurrent * (convolved * width + recurrent * _STATE_BYTES)


def _kinds_by_rule(text: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kind of each layer of a model whose configuration gives a rule in place of a list."""
    pattern, every = text.get("hybrid_override_pattern"), text.get("full_attention_interval")
    if isinstance(pattern, str):
        return [{"M": "mamba", "*": "attention"}.get(letter, "mlp") for letter in pattern]
    if isinstance(every, int) and every > 0:
        return ["linear_attention" if (layer + 1) % every else "attention" for layer in range(layers)]
    if text.get("model_type") == "falcon_h1":
        return ["hybrid"] * layers
    period, offset = text.get("attn_layer_period"), text.get("attn_layer_offset", 0)
    if isinstance(period, int) and period > 0:
        return ["attention" if layer % period == offset else "mamba" for layer in range(layers)]
    attending = text.get("attn_layer_indices")
    if isinstance(attending, list) or "num_attention_heads" not in text:
        return ["attention" if layer in (attending or ()) else "mamba" for layer in range(layers)]
    return ["attention"] * layers


def _elements(text: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the elements of the convolution and of the recurrence of one layer; None if it keeps no known state."""
    for found in (_delta_net(text), _mamba(text), _convolution(text), _lightning(text)):
        if found is not None:
            return found
    return None


def _delta_net(text: Mapping[str, Any]) -> tuple[int, int] | None:
    kernel = _first(text, "linear_conv_kernel_dim")
    if kernel is None:
        return None
    keys, values = _first(text, "linear_num_key_heads", "linear_num_heads"), _first(text, "linear_num_value_heads")
    key_dim, value_dim = _first(text, "linear_key_head_dim", "linear_head_dim"), _first(text, "linear_value_head_dim")
    if keys is None or key_dim is None:
        return None
    values, value_dim = values or keys, value_dim or key_dim
    return (2 * keys * key_dim + values * value_dim) * kernel, values * key_dim * value_dim


def _mamba(text: Mapping[str, Any]) -> tuple[int, int] | None:
    state, kernel = (
        _first(text, "mamba_d_state", "ssm_state_size", "state_size"),
        _first(text, "mamba_d_conv", "conv_kernel"),
    )
    if state is None or kernel is None:
        return None
    expanded = int((_first(text, "mamba_expand", "expand") or 1) * (_first(text, "hidden_size") or 0))
    if text.get("model_type") in ("mamba", "falcon_mamba"):
        expanded = _first(text, "intermediate_size") or expanded
    groups = _first(text, "mamba_n_groups", "mamba_ngroups", "n_groups")
    if groups is None:  # the first version of Mamba
        return expanded * kernel, expanded * state
    heads, size = (
        _first(text, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"),
        _first(text, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"),
    )
    inner = heads * size if heads is not None and size is not None else expanded
    return (inner + 2 * groups * state) * kernel, inner * state


def _convolution(text: Mapping[str, Any]) -> tuple[int, int] | None:
    hidden, short, width = (_first(text, name) for name in ("hidden_size", "conv_L_cache", "lru_width"))
    if short is not None and hidden is not None:
        return hidden * short, 0
    return None if width is None else (width * ((_first(text, "conv1d_width") or 1) - 1), width)


def _lightning(text: Mapping[str, Any]) -> tuple[int, int] | None:
    heads, size = _first(text, "num_attention_heads"), _first(text, "head_dim")
    if text.get("model_type") != "minimax" or heads is None:
        return None
    size = size or (_first(text, "hidden_size") or 0) // max(heads, 1)
    return 0, heads * size * size


def _first(text: Mapping[str, Any], *names: str) -> int | None:
    return next((text[name] for name in names if isinstance(text.get(name), int)), None)

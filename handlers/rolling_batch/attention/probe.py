"""Finds out, for any architecture, how its layers attend, and refuses what the slotted KV cache does not provide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from handlers.checkpoints.placement import main_device
from handlers.rolling_batch.attention.kv_cache import LayerShape


class UnsupportedAttentionError(Exception):
    """The model's attention needs an input that the slotted KV cache does not provide. The message names it."""


@dataclass(frozen=True)
class AttentionLayer:
    """An attention module, what it keeps per token, and how it calls its attention function."""

    module: Any
    shape: LayerShape
    settings: dict[str, Any]


def probe_layers(model: Any, name: str) -> list[AttentionLayer]:
    """Run one token through `model` and return its attention layers in order.

    The attention function that records the calls shows, for any architecture, what its layers keep per token and what
    else they ask for. Raises UnsupportedAttentionError if a layer does not call it, or needs more than queries, keys,
    values, a window and a soft cap.
    """
    layers: dict[int, AttentionLayer] = {}

    def record(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        extra = [name for name in ("s_aux", "sinks", "position_bias", "alibi") if more.get(name) is not None]
        extra += ["a mask of its own"] if attention_mask is not None else []
        extra += [f"{key.dtype} keys in a {model.dtype} model"] if key.dtype != model.dtype else []
        if extra:
            raise UnsupportedAttentionError(f"{type(module).__name__} attends with {extra[0]}")
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.device)
        settings = {name: more.get(name) for name in ("scaling", "sliding_window", "softcap")}
        layers[module.layer_idx] = AttentionLayer(module, shape, settings)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(name, record)
    model.set_attn_implementation(name)
    device = main_device(model)
    with torch.inference_mode():
        model(
            input_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
            position_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
            use_cache=False,
        )
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise UnsupportedAttentionError(f"{type(model).__name__} does not use transformers' attention interface")
    if len(layers) != model.config.get_text_config().num_hidden_layers or getattr(model, "_is_stateful", False):
        raise UnsupportedAttentionError(f"{type(model).__name__} keeps states beside the keys and values of attention")
    return [layers[index] for index in range(len(layers))]

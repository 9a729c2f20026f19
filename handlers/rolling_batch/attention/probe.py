"""Finds out, for any architecture, how its layers attend, and refuses what the slotted KV cache does not provide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from handlers.checkpoints.placement import main_device
from handlers.rolling_batch.attention.kv_cache import LayerShape
from handlers.rolling_batch.attention.pass_inputs import PassInputs
from handlers.rolling_batch.attention.terms import AttentionTerms, terms_of

_ROWS = 3  # of one row, a count per row would pass for one number


class UnsupportedAttentionError(Exception):
    """The model's attention needs an input that the slotted KV cache does not provide. The message names it."""


@dataclass(frozen=True)
class AttentionLayer:
    """An attention module, what it keeps per token, and how it attends."""

    module: Any
    shape: LayerShape
    terms: AttentionTerms


def probe_layers(model: Any, name: str, inputs: PassInputs, keeps_states: bool = False) -> list[AttentionLayer]:
    """Run a few tokens through `model`, for `inputs` to find its arguments; return its attention layers.

    The attention function that records the calls shows, for any architecture, what its layers keep per token, and their
    other arguments. The layers come in the order of their calls. Raises UnsupportedAttentionError if a layer does not
    call it, or needs more than queries, keys, values, and what AttentionTerms has. `keeps_states`: some layers have a
    state in place of attention, or all have.
    """
    layers: list[AttentionLayer] = []
    chunks = _chunks(model.config.get_text_config())

    def record(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        extra = [name for name in ("position_bias", "alibi") if more.get(name) is not None]
        extra += ["a mask of its own"] if attention_mask is not None else []
        extra += [f"{key.dtype} keys in a {model.dtype} model"] if key.dtype != model.dtype else []
        if extra:
            raise UnsupportedAttentionError(f"{type(module).__name__} attends with {extra[0]}")
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.device)
        chunk = chunks.get(getattr(module, "layer_idx", -1), 0)
        layers.append(AttentionLayer(module, shape, terms_of(query.shape[3], more, chunk)))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(name, record)
    model.set_attn_implementation(name)
    device = main_device(model)
    with torch.inference_mode():
        ids = torch.zeros((1, _ROWS), dtype=torch.long, device=device)
        inputs.find(model, ids, counts_alone=not keeps_states)
        layers.clear()
        model(**inputs(ids, torch.arange(_ROWS, device=device)[None]))
    found = list(layers)
    if keeps_states:
        return found
    if not found:
        raise UnsupportedAttentionError(f"{type(model).__name__} does not use transformers' attention interface")
    if len(found) < model.config.get_text_config().num_hidden_layers:
        raise UnsupportedAttentionError(f"{type(model).__name__} has layers that do not attend through that interface")
    return found


def _chunks(config: Any) -> dict[int, int]:
    """Return within how many tokens each layer attends that does so in chunks (Llama 4); a mask says it otherwise."""
    kinds = enumerate(getattr(config, "layer_types", None) or ())
    return {layer: int(config.attention_chunk_size) for layer, kind in kinds if kind == "chunked_attention"}

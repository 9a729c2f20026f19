"""Decoder layers of Llama's structure, each in few passes over its activations.

A small model is bound by the calls between its operations rather than by arithmetic: transformers runs a decoder layer
as dozens of operations, and each reads and writes all activations. The fused layer makes eight. On a GPU one row takes
six: there one kernel multiplies it, and computes what lies between the products as well (one_row.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from handlers.checkpoints.blocks.int8_activations import unrounded_activations
from handlers.rolling_batch.attention.flat import FlatAttention
from handlers.rolling_batch.attention.probe import AttentionLayer
from handlers.rolling_batch.attention.rows import StepRows
from handlers.rolling_batch.fused.modules import PROJECTIONS, FusedGatedMLP, FusedRMSNorm, ProjectionPart, close
from handlers.rolling_batch.fused.row_kernels import row_kernels

# What a decoder layer passes to the attention of a Llama. An attention that takes more also computes more: Ministral 3
# scales queries by their positions, without effect near position 0: comparing results alone would not find it.
_GIVEN = {"hidden_states", "position_embeddings", "attention_mask", "past_key_values"}

Attend = Callable[[torch.Tensor], torch.Tensor]
"""Queries, keys and values side by side, (rows, width) -> attended values, (rows, heads * dim)."""


def fuse_decoder_layers(model: nn.Module, layers: list[AttentionLayer], attention: FlatAttention) -> int:
    """Replace the decoder layers of Llama's structure whose modules `fuse` has replaced; return how many."""
    owners = {id(layer.module): layer for layer in layers}
    rotary = _rotary_of(model)
    replaced = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            layer = owners.get(id(getattr(child, "self_attn", None)))
            if layer and _is_llama_layer(child, layer):
                fused = FusedDecoderLayer(child, layer, attention)
                if _same_layer(child, fused, rotary, attention):
                    setattr(module, name, fused)
                    replaced.append(fused)
    if replaced and replaced[0].input_layernorm.weight.device.type == "cuda":
        from handlers.rolling_batch.fused import one_row

        one_row.choose(replaced)
    return len(replaced)


def _is_llama_layer(module: Any, layer: AttentionLayer) -> bool:
    if set(dict(module.named_children())) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention = module.self_attn
    if not _named_parameters(attention.forward) <= _GIVEN:
        return False
    norms = (module.input_layernorm, module.post_attention_layernorm)
    return (
        set(dict(attention.named_children())) == {*PROJECTIONS, "o_proj"}
        and isinstance(attention.q_proj, ProjectionPart)
        and isinstance(module.mlp, FusedGatedMLP)
        and all(isinstance(norm, FusedRMSNorm) for norm in norms)
        and layer.shape.head_dim == layer.shape.value_dim
        and layer.terms.is_plain
    )


def _named_parameters(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}


def _rotary_of(model: nn.Module) -> nn.Module | None:
    """Return the module that computes the model's rotary position embeddings."""
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    return found[0] if found and "layer_type" not in _named_parameters(found[0].forward) else None


def _same_layer(
    original: nn.Module, fused: FusedDecoderLayer, rotary: nn.Module | None, attention: FlatAttention
) -> bool:
    """Compare what both add to random activations, at positions far enough apart for rotation to matter."""
    if rotary is None:
        return False
    norm = fused.input_layernorm.weight
    positions = torch.tensor([[0, 11, 37, 80, 150, 333, 700]], device=norm.device)
    rows = torch.randn((1, 7, norm.shape[0]), generator=torch.Generator().manual_seed(0)).to(norm)
    added = []
    with torch.inference_mode(), unrounded_activations(original, fused):
        embeddings = rotary(rows, positions)
        for layer in (original, fused):
            attention.begin(StepRows(np.zeros(7, np.int64), np.arange(7), []))
            out = layer(rows, position_embeddings=embeddings, attention_mask=None, past_key_values=None)
            added.append(out - rows)
    return close(*added)


class FusedDecoderLayer(nn.Module):
    """A decoder layer of Llama's structure in eight passes over its activations."""

    def __init__(self, original: Any, layer: AttentionLayer, attention: FlatAttention) -> None:
        super().__init__()
        self.input_layernorm = original.input_layernorm
        self.qkv_proj = original.self_attn.q_proj.shared.linear
        self.o_proj = original.self_attn.o_proj
        self.post_attention_layernorm = original.post_attention_layernorm
        self.mlp = original.mlp
        self._kernels = row_kernels(self.input_layernorm.weight.device)
        self._attention = attention
        self.terms = layer.terms
        self.index: int = layer.module.layer_idx
        self._owner = _LayerIndex(self.index)
        self.dim = layer.shape.head_dim
        self._kv_heads = layer.shape.kv_heads
        self._heads = self.qkv_proj.out_features // self.dim - 2 * self._kv_heads
        self.qkv_widths = tuple(heads * self.dim for heads in (self._heads, self._kv_heads, self._kv_heads))
        self.by_one_row = False
        """Whether one row is multiplied by the kernel for one row."""
        self.chained = False
        """Whether launches for one row may begin before the one in front of them has ended."""

    def forward(
        self, hidden: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """(1, rows, width) -> the same shape; cosines and sines are (1, rows, head_dim)."""

        def attend(qkv: torch.Tensor) -> torch.Tensor:
            return self._attend(qkv, position_embeddings, alone and self.chained)

        alone = self.by_one_row and hidden.shape[1] == 1 and not self._is_watched()
        return self.linears(hidden[0], attend, alone)[None]

    def linears(
        self, rows: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor], by_one_row: bool
    ) -> torch.Tensor:
        """Compute rows (n, width) with `attend`.

        `by_one_row`: by the kernel for one row.
        """
        if by_one_row:
            return self._linears_of_one(rows, attend)
        attended = attend(self.qkv_proj(self.input_layernorm(rows)))
        norm = self.post_attention_layernorm
        rows, normed = self._kernels.add_and_norm(rows, self.o_proj(attended), norm.weight, norm.epsilon)
        return rows + self.mlp(normed)

    def _linears_of_one(self, row: torch.Tensor, attend: Attend) -> torch.Tensor:
        from handlers.rolling_batch.fused.one_row import multiply

        mlp = self.mlp
        attended = attend(multiply(row.contiguous(), self.qkv_proj, self.input_layernorm, chained=self.chained))
        row = multiply(attended, self.o_proj, residual=row, chained=self.chained)
        gated = multiply(row, mlp.gate_up_proj, self.post_attention_layernorm, gated=True, chained=self.chained)
        return multiply(gated, mlp.down_proj, residual=row, chained=self.chained)

    def _is_watched(self) -> bool:
        """Whether something is to happen where a linear layer is called: adapters, or a compilation."""
        linears = (self.qkv_proj, self.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj)
        return torch.compiler.is_compiling() or any(linear._forward_hooks for linear in linears)

    def _attend(
        self, qkv: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], chained: bool
    ) -> torch.Tensor:
        cosines, sines = (part[0].contiguous() for part in position_embeddings)
        if self._attention.rotates and not torch.compiler.is_compiling():
            return self._attention.attend_projected(self.index, qkv, cosines, sines, self._heads, chained)
        rotated = self._heads + self._kv_heads
        self._kernels.rotate(qkv, cosines, sines, rotated)
        heads = qkv.unflatten(1, (-1, self.dim)).transpose(0, 1)
        query, key, value = heads.split((self._heads, self._kv_heads, self._kv_heads))
        return self._attention(self._owner, query[None], key[None], value[None])[0].flatten(2)[0]


class _LayerIndex(nn.Module):
    """Stands for the attention module: an attention function reads the layer's index only."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

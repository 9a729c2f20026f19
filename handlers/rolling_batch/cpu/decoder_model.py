"""All decoder layers of a model of Llama's structure as one call of a kernel, for passes without prompt chunks.

A pass that only decodes has few rows. Layer by layer, and through transformers' own forward, it spends milliseconds in
Python between calls, which is most of its time if the model is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from handlers.checkpoints.blocks.int8_activations import unrounded_activations
from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.cpu_kernels.arguments import Activations, DecodeRows, LayerArrays, LayerSettings
from handlers.ranks.sharding import RowParallelLinear
from handlers.ranks.shm_allreduce import ONE_RANK, ShmAllReduce
from handlers.rolling_batch.attention.rows import StepRows
from handlers.rolling_batch.attention.slot_attention import SlotAttention
from handlers.rolling_batch.cpu.kernel_choice import ALL, Crossovers, Work
from handlers.rolling_batch.cpu.linears import PackedLinear, TiledLinear
from handlers.rolling_batch.cpu.lookup_tables import RotaryTable, embedding_rows
from handlers.rolling_batch.fused.decoder_layers import FusedDecoderLayer
from handlers.rolling_batch.fused.modules import FusedRMSNorm, close

_PLACES = 4  # of the KV cache that are written while passes are measured


class DecoderModel:
    """Embeddings, decoder layers, norm and head of a model, for the passes that the kernel can compute."""

    def __init__(self, model: Any, attention: SlotAttention) -> None:
        from handlers.cpu_kernels.decoder import decoder_layers

        base = model.model
        self.head = model.lm_head
        # Up to which the project's kernel computes the head.
        self.max_head_rows: int = (
            self.head.max_rows if isinstance(self.head, (TiledLinear, PackedLinear, BlockLinear)) else 0
        )
        self._embed = embedding_rows(base.embed_tokens)
        layers: list[FusedDecoderLayer] = list(base.layers)
        arrays = [_arrays(layer, attention) for layer in layers]
        addresses = np.array([[array.ctypes.data for array in row] for row in arrays], np.uintp)
        windows = np.array([layer.terms.window for layer in layers], np.int64)
        self._arrays = arrays  # keeps them alive: the kernel gets addresses, except for the first layer's
        norm, epsilon = base.norm.arguments
        self._layers = (addresses, windows, arrays[0], norm, LayerSettings(*_settings(layers[0]), epsilon))
        self._widths, self._dim = _widths(layers[0]), layers[0].dim
        self._space = self._new_space(1)
        self._hooks = [module._forward_hooks for layer in layers for module in _linears(layer)]
        shm = _shm(layers[0])
        self._rotary = RotaryTable(base.rotary_emb, arrays[0].keys.shape[2], torch.bfloat16)
        self._shared = ONE_RANK if shm is None else shm.shared(torch.bfloat16)
        self._attention = attention
        self._kernel = decoder_layers
        self.max_rows = ALL  # more are left to the layers

    @classmethod
    def from_model(
        cls, model: Any, attention: SlotAttention, crossovers: Crossovers, decode_rows: int = ALL
    ) -> DecoderModel | None:
        """Return it for a model whose modules are fused, and which never decodes more than `decode_rows` rows at once.

        None if the kernel would not compute what the model does, or if the layers are faster one by one.
        """
        if not _is_llama(model) or attention.cache_of(0) is None:
            return None
        layers = list(model.model.layers)
        if not all(type(layer) is FusedDecoderLayer and layer.mlp.is_silu and _is_tiled(layer) for layer in layers):
            return None
        if type(model.model.norm) is not FusedRMSNorm or model.dtype != torch.bfloat16:
            return None
        kinds = {(*_settings(layer), _shm(layer), *_widths(layer), *_shapes(layer, attention)) for layer in layers}
        if len(kinds) > 1 or [layer.index for layer in layers] != list(range(len(layers))):
            return None
        found = cls(model, attention)
        if not found._computes_the_same_as(model):
            return None
        found.max_rows = found._crossover(model, crossovers, decode_rows)
        found._space = found._new_space(1)  # passes have fewer rows than were measured
        return found if found.max_rows else None

    def _crossover(self, model: Any, crossovers: Crossovers, decode_rows: int) -> int:
        """Return the number of rows up to which the call is faster than the layers one by one.

        It is while these use the same kernels for all their linear layers, and may be with more rows.
        """
        linears = [linear for layer in model.model.layers for linear in _own_linears(layer)]
        least: int = min(linear.max_rows for linear in linears)
        if least >= decode_rows or len(self._shared.blocks) > 1:
            return least  # ranks measure at different times, and a pass takes all of them
        shapes = ", ".join(
            f"{linear.in_features} x {linear.out_features}" for linear in _own_linears(model.model.layers[0])
        )

        def passes(compute: Callable[[np.ndarray, np.ndarray, np.ndarray], object]) -> Callable[[int], Work]:
            def of(rows: int) -> Work:
                ids, places, kept = np.zeros(rows, np.int64), np.arange(rows) % _PLACES, np.arange(rows)

                def work() -> object:
                    self._attention.begin(StepRows(np.zeros(rows, np.int64), places, []))
                    return compute(ids, places, kept)

                return work

            return of

        def layer_by_layer(ids: np.ndarray, positions: np.ndarray, kept: np.ndarray) -> object:
            places = torch.from_numpy(positions)[None]
            inputs = {"input_ids": torch.from_numpy(ids)[None], "position_ids": places, "use_cache": False}
            return model(**inputs, logits_to_keep=kept).logits

        with torch.inference_mode():
            name = f"{len(model.model.layers)} decoder layers at once ({shapes})"
            return crossovers.crossover(name, passes(self.logits), passes(layer_by_layer), least, decode_rows)

    def _computes_the_same_as(self, model: Any) -> bool:
        """Compare logits: a model may scale embeddings or logits, or do anything else outside its layers."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.model.embed_tokens.weight.shape[0], (1, 7), generator=generator)
        positions = np.arange(7)
        self._attention.begin(StepRows(np.zeros(7, np.int64), np.arange(7), []))
        with torch.inference_mode(), unrounded_activations(model):
            expected = model(input_ids=ids, position_ids=torch.from_numpy(positions)[None], use_cache=False).logits
            computed = self.logits(ids[0].numpy(), positions, positions)
        return computed is not None and close(expected[0], computed)

    def logits(self, ids: np.ndarray, positions: np.ndarray, kept: np.ndarray) -> torch.Tensor | None:
        """Token ids and positions, both (rows,) int64 -> logits of the rows `kept`, (kept, vocabulary), or None."""
        normed = self.normed(ids, positions, kept)
        return None if normed is None else self.head_of(normed)

    def head_of(self, normed: np.ndarray) -> torch.Tensor:
        """Return the logits of what `normed` returns.

        Between two steps weights have driven the code of torch's operators from the caches: where the head is the
        project's kernel, none is called but for the view.
        """
        head = self.head
        if not 0 < len(normed) <= self.max_head_rows or head._forward_hooks:
            logits: torch.Tensor = head(torch.from_numpy(normed).view(torch.bfloat16))
            return logits
        out = np.empty((len(normed), head.out_features), np.uint16)
        head.compute(normed, out)
        return torch.from_numpy(out).view(torch.bfloat16)

    def normed(self, ids: np.ndarray, positions: np.ndarray, kept: np.ndarray) -> np.ndarray | None:
        """Token ids and positions, both (rows,) int64 -> what the head takes for the rows `kept`, (kept, width).

        It is valid until the next pass. None if the kernel does not compute the pass: it has prompt chunks, more rows
        than are faster so, or padding, or a hook (a LoRA adapter's) changes what a linear layer computes.
        """
        rows = self._attention.single_rows()
        if rows is None or len(rows[0]) != len(ids) or len(ids) > self.max_rows or any(self._hooks):
            return None
        hidden, space = self._embed(ids), self._room(len(ids))
        self._kernel(DecodeRows(hidden, *self._rotary.rows(positions), *rows), space, *self._layers, self._shared)
        is_kept = len(kept) == len(hidden) and np.array_equal(kept, np.arange(len(kept)))
        return space.normed if is_kept else space.normed.take(kept, axis=0)

    def _new_space(self, rows: int) -> Activations:
        width, projected, attended, inner = self._widths
        dim = self._dim
        shapes = (width,), (width,), (projected,), (attended // dim, dim), (2 * inner,), (inner,)
        return Activations(*(np.empty((rows, *shape), np.uint16) for shape in shapes))

    def _room(self, rows: int) -> Activations:
        """Return room for the activations of `rows` rows.

        It is kept from pass to pass: the system would take such large blocks of memory back each time.
        """
        if len(self._space.normed) < rows:
            self._space = self._new_space(rows)
        return Activations(*(part[:rows] for part in self._space))


def _widths(layer: FusedDecoderLayer) -> tuple[int, int, int, int]:
    """Return the widths of a layer's input, of its projections, of what it attends to, and of its MLP."""
    _, _, o_proj, down_proj = _own_linears(layer)
    return o_proj.out_features, layer.qkv_proj.out_features, o_proj.in_features, down_proj.in_features


def _shapes(layer: FusedDecoderLayer, attention: SlotAttention) -> list[object]:
    """Return types and shapes of the arrays; those of stored weights differ in length if their formats are mixed."""
    arrays = _arrays(layer, attention)
    return [(array.dtype, array.ndim if array.dtype == np.int64 else array.shape) for array in arrays]


def _is_llama(model: Any) -> bool:
    base = getattr(model, "model", None)
    return (
        isinstance(base, nn.Module)
        and set(dict(model.named_children())) == {"model", "lm_head"}
        and set(dict(base.named_children())) == {"embed_tokens", "layers", "norm", "rotary_emb"}
    )


def _linears(layer: FusedDecoderLayer) -> list[nn.Module]:
    """Return the modules that compute linear layers, and the row-parallel modules around them."""
    summed = (layer.o_proj, layer.mlp.down_proj)
    parts = [module.linear for module in summed if isinstance(module, RowParallelLinear)]
    return [layer.qkv_proj, layer.mlp.gate_up_proj, *summed, *parts]


def _is_tiled(layer: FusedDecoderLayer) -> bool:
    """Whether all linear layers are laid out in panels without padded inputs, and no bias follows the ranks' sum."""
    summed = [module for module in _linears(layer) if isinstance(module, RowParallelLinear)]
    return (
        len(summed) in (0, 2)
        and all(module.bias is None for module in summed)
        and all(
            isinstance(module, (TiledLinear, BlockLinear)) and not module.is_padded for module in _own_linears(layer)
        )
    )


def _own_linears(layer: FusedDecoderLayer) -> list[Any]:
    """Return the modules that compute linear layers, without the sums over ranks around them."""
    return [module for module in _linears(layer) if not isinstance(module, RowParallelLinear)]


def _shm(layer: FusedDecoderLayer) -> ShmAllReduce | None:
    return layer.o_proj.communicator.shm if isinstance(layer.o_proj, RowParallelLinear) else None


def _settings(layer: FusedDecoderLayer) -> tuple[float, float, int, float, float]:
    """Return what LayerSettings has of a layer."""
    epsilons = layer.input_layernorm.arguments[1], layer.post_attention_layernorm.arguments[1]
    return layer.terms.scaling, layer.terms.softcap, torch.get_num_threads(), *epsilons


def _arrays(layer: FusedDecoderLayer, attention: SlotAttention) -> LayerArrays:
    def laid(module: Any) -> tuple[np.ndarray, np.ndarray]:
        linear = module.linear if isinstance(module, RowParallelLinear) else module
        return linear.laid, linear.added

    kept = attention.cache_of(layer.index)
    assert kept is not None  # `of` has checked it
    norm, post_norm = (norm.arguments[0] for norm in (layer.input_layernorm, layer.post_attention_layernorm))
    projections = (*laid(layer.qkv_proj), *laid(layer.o_proj))
    return LayerArrays(*kept, norm, *projections, post_norm, *laid(layer.mlp.gate_up_proj), *laid(layer.mlp.down_proj))

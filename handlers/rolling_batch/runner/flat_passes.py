"""Computes a pass as one sequence of rows, which attention alone tells apart.

A model that leaves attention to a given function computes any rows so: one token of each sequence that decodes, then
the tokens of prompt chunks. `SequencePasses` computes the passes of other models.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.checkpoints.placement import is_spread, main_device
from handlers.rolling_batch.attention.decode_passes import DecodeStep
from handlers.rolling_batch.attention.kv_cache import KVCache, LayerShape
from handlers.rolling_batch.attention.pass_inputs import PassInputs
from handlers.rolling_batch.attention.probe import probe_layers
from handlers.rolling_batch.attention.slot_attention import SlotAttention
from handlers.rolling_batch.cpu.decoder_model import DecoderModel
from handlers.rolling_batch.cpu.kernel_choice import Crossovers
from handlers.rolling_batch.cpu.linears import PackedLinear, TiledLinear
from handlers.rolling_batch.cpu.pass_threads import begin_pass, start_helpers
from handlers.rolling_batch.device_arrays import known_tokens, upload
from handlers.rolling_batch.fused.decoder_layers import fuse_decoder_layers
from handlers.rolling_batch.images.prompt import EmbeddedRows
from handlers.rolling_batch.pages.attention import PageAttention
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.rows import PageRows
from handlers.rolling_batch.runner.load_check import keeps_rows
from handlers.rolling_batch.runner.step_layout import pad_rows
from handlers.rolling_batch.runner.step_messages import Pass
from handlers.rolling_batch.states.model_states import ModelStates
from handlers.rolling_batch.states.probe import keeps_states

_numbers = itertools.count()  # of attention functions


class FlatPasses:
    """Computes passes of `model` over the KV cache that `use` gives it. `kv_dtype` is as in ModelRunner."""

    def __init__(self, model: Any, kv_dtype: str | None) -> None:
        """See by some tokens how the layers attend. Raises one of CODE_ERRORS if no flat pass computes them."""
        self._model = model
        self._device = main_device(model)
        self._dtype: torch.dtype = model.dtype
        self._on_cpu = self._device.type == "cpu"
        self._is_spread = is_spread(model)
        self._is_packed = kv_dtype is not None
        self._keeps_rows = keeps_rows(model)
        self._inputs = PassInputs(model)
        self._name = f"lmi_rolling_batch_{next(_numbers)}"
        self._layers = probe_layers(model, f"{self._name}_probe", self._inputs, keeps_states(model))
        self.states = ModelStates.from_model(model, self._inputs, self._device)
        self.attention: SlotAttention | PageAttention
        self.decoder: DecoderModel | None = None  # computes all layers at once
        self.unpadded_rows = 0  # up to which passes are not padded
        self._has_helpers = False

    @property
    def shapes(self) -> list[LayerShape]:
        """What each layer that attends keeps per token."""
        shapes = [layer.shape for layer in self._layers]
        return [shape.packed() for shape in shapes] if self._is_packed else shapes

    @property
    def in_call_order(self) -> bool:
        """Whether the layers that attend are counted as they are called, because their numbers have gaps or repeat."""
        numbers = [getattr(layer.module, "layer_idx", None) for layer in self._layers]
        return self.states is not None or numbers != list(range(len(numbers)))

    @property
    def takes_pages(self) -> bool:
        """Whether the KV cache may have pages: some layer attends."""
        return bool(self._layers)

    def use(self, cache: KVCache | PagedCache) -> DecodeStep:
        """Keep keys and values in `cache`, which was made for `shapes`; return the step of rows that decode."""
        terms = [layer.terms for layer in self._layers]
        if isinstance(cache, PagedCache):
            self.attention = PageAttention(cache, self._name, terms, self.in_call_order)
        else:
            self.attention = SlotAttention(cache, self._name, terms, self.in_call_order, self._dtype)
        self._model.set_attn_implementation(self._name)
        turns = bool(getattr(self._model, "turns_by_axes", False))
        return DecodeStep(self._model, self.attention, self._inputs, turns, self.states)

    def fuse_layers(self, crossovers: Crossovers, decode_rows: int, at_once: bool) -> dict[str, int]:
        """Fuse the decoder layers of a model whose modules are fused; return how many, and whether they became one.

        They become one call where that is faster, `at_once` allows it and the CPU computes the model.
        """
        fused = {"decoder_layers": fuse_decoder_layers(self._model, self._layers, self.attention)}
        if at_once and self._keeps_rows and self._on_cpu and isinstance(self.attention, SlotAttention):
            self.decoder = DecoderModel.from_model(self._model, self.attention, crossovers, decode_rows)
        self.unpadded_rows = 0 if self.decoder is None else _rows_without_onednn(self._model)
        return {**fused, "models": int(self.decoder is not None)}

    def use_helpers(self) -> bool:
        """Let helper threads compute passes that need no OpenMP, if there are such; return whether there are."""
        self._has_helpers = self.decoder is not None and start_helpers()
        return self._has_helpers

    def row_by_row(self, start: int, end: int) -> bool:
        """Whether a chunk of tokens `start:end` attends row by row; a chunk that a mixer computes is kept whole."""
        return self.states is None and self.attention.row_by_row(start, end)

    def pad(self, step: Pass, has_adapters: bool) -> Pass:
        """Add rows that nothing reads to a pass of oneDNN."""
        if not self._on_cpu:
            return step
        if len(step.token_ids) > self.unpadded_rows and not self._is_at_once(step, has_adapters):
            step = replace(step, token_ids=pad_rows(step.token_ids), positions=pad_rows(step.positions))
        return replace(step, keep=pad_rows(step.keep)) if len(step.keep) > self.unpadded_rows else step

    def measure(self, rows: int) -> None:
        """Compute `rows` rows without a KV cache."""
        with torch.inference_mode():
            self._forward(upload([0] * rows, self._device), list(range(rows)), [rows - 1])

    def logits(
        self, step: Pass, before: torch.Tensor | None, embedded: EmbeddedRows | None, has_adapters: bool
    ) -> torch.Tensor:
        """Return the logits of the rows to keep, (rows, vocabulary); `before` are the tokens of the step before."""
        if self._has_helpers:
            few = max(len(step.token_ids), len(step.keep)) <= self.unpadded_rows
            begin_pass(few or self._is_at_once(step, has_adapters))
        self.attention.begin(step.rows())
        with torch.inference_mode():
            if embedded is None and (logits := self._logits_at_once(step)) is not None:
                return logits
            ids = known_tokens(upload(step.token_ids, self._device), before)
            if self.states is None:
                return self._forward(ids, step.positions, step.keep, embedded)
            self.states.begin(step.slots, step.positions, step.chunks, step.states)
            logits = self._forward(ids, step.positions, step.keep, embedded)
            self.states.end(step.states)
            return logits

    def _is_at_once(self, step: Pass, has_adapters: bool) -> bool:
        """Whether one call of a kernel computes all layers for the rows of a pass."""
        if self.decoder is None or step.chunks or has_adapters:
            return False
        return len(step.token_ids) <= self.decoder.max_rows

    def _logits_at_once(self, step: Pass) -> torch.Tensor | None:
        """Return the logits if one call of a kernel computes all layers of the pass, else None."""
        if self.decoder is None:
            return None
        ids, positions, kept = (np.array(numbers, np.int64) for numbers in (step.token_ids, step.positions, step.keep))
        normed = self.decoder.normed(ids, positions, kept)
        if normed is None:
            return None
        if self._has_helpers:
            begin_pass(len(kept) <= self.decoder.max_head_rows)  # the head is one operation of OpenMP's
        return self.decoder.head_of(normed)

    def _forward(
        self, token_ids: torch.Tensor, positions: list[int], keep: list[int], embedded: EmbeddedRows | None = None
    ) -> torch.Tensor:
        ids, places = token_ids[None], upload(positions, self._device)[None]
        # accelerate moves tensors to the first device of a model; the rows are on its last one.
        kept = np.array(keep, np.int64) if self._is_spread or self._on_cpu else upload(keep, self._device)
        if embedded is not None:
            return self._embedded(embedded, ids, places, kept)
        return self._logits(ids, places, kept)

    def _logits(self, ids: torch.Tensor, places: torch.Tensor, kept: Any) -> torch.Tensor:
        inputs = self._inputs(ids, places)
        if self._keeps_rows:
            return self._model(**inputs, logits_to_keep=kept).logits[0]
        return self._model(**inputs).logits[0, kept]

    def over_pages(self, ids: torch.Tensor, places: torch.Tensor, rows: PageRows, kept: torch.Tensor) -> torch.Tensor:
        """Return the logits of the rows `kept`, of a pass over pages whose `rows` are on the device already."""
        assert isinstance(self.attention, PageAttention)
        self.attention.begin_rows(rows)
        return self._logits(ids[None], places[None], kept)

    def _embedded(self, embedded: EmbeddedRows, ids: torch.Tensor, places: torch.Tensor, kept: Any) -> torch.Tensor:
        """Return the logits of a pass in which sequences have images."""
        if embedded.positions is not None:
            places = upload(embedded.positions, self._device)[:, None]
        inputs = embedded.inputs(ids, self._model)
        return self._model(**inputs, position_ids=places, use_cache=False, logits_to_keep=kept).logits[0]


def _rows_without_onednn(model: Any) -> int:
    """Return up to how many rows oneDNN computes no linear layer of a fused model."""
    linears = (module for module in model.modules() if isinstance(module, (TiledLinear, PackedLinear, BlockLinear)))
    return min((linear.max_rows for linear in linears), default=0)

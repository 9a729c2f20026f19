"""LoRA adapters in the rolling batch: each row of the flat pass gets the low-rank update of its own adapter.

The updates of all adapters in the batch are stacked along their ranks (as in S-LoRA, Sheng et al., 2024), so that a
linear layer takes two small products for all of them together; a mask keeps each row to the ranks of its own adapter.
Rows without adapter are left out, and without adapters in the batch the model runs as if there were none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from handlers.rolling_batch.lora_targets import LoraTarget, lora_targets
from lmi_server.contract.errors import RequestError

_Adder = Callable[[nn.Module, tuple[torch.Tensor], torch.Tensor], None]

_MOST_IDLE_RANKS = 4  # a stack of so many times the ranks that the batch needs is built anew


@dataclass(frozen=True)
class LoraPair:
    """What an adapter adds to one linear layer: `scaling * up @ down`, of shapes (out, rank) and (rank, in)."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """An adapter, laid out for the modules that compute: (ranks, in) and the scaled (ranks, out) of each."""

    layers: Mapping[nn.Module, tuple[torch.Tensor, torch.Tensor]]

    @property
    def ranks(self) -> int:
        """Return the rows of its largest matrix."""
        return max(int(down.shape[0]) for down, _ in self.layers.values())


@dataclass(frozen=True, eq=False)
class _Stack:
    """The matrices of several adapters in one module; `owners` tells for each rank the place of its adapter."""

    down: torch.Tensor  # (in, ranks)
    up: torch.Tensor  # (ranks, out)
    owners: tuple[int, ...]


@dataclass(eq=False)
class _Rows:
    """The rows of a pass that have an adapter, and the place of each one's adapter; what pads them has place -1."""

    index: torch.Tensor
    owners: torch.Tensor  # (rows, 1)
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def mask(self, owners: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return (rows, ranks): one where the rank belongs to the row's adapter."""
        mask = self.masks.get(owners)
        if mask is None:
            mask = (self.owners == torch.tensor(owners, device=self.owners.device)).to(dtype)
            self.masks[owners] = mask
        return mask


class LoraLayers:
    """Adds adapters to what the linear layers of `model` compute.

    `scored_rows_only`: the model computes logits of some rows of the pass only, those that `begin` is told. `pad` adds
    rows, so that few different counts of them occur.
    """

    def __init__(self, model: Any, scored_rows_only: bool, pad: Callable[[list[int]], list[int]]) -> None:
        self._places = lora_targets(model)
        self._head: nn.Module | None = model.get_output_embeddings() if scored_rows_only else None
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._pad = pad
        self._stacked: dict[LoraWeights, int] = {}  # the adapters of the stacks, and their places
        self._adders: dict[nn.Module, _Adder] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []  # none where no row of the pass has an adapter
        self._rows: _Rows | None = None  # of the current pass; None where no row has an adapter
        self._head_rows: _Rows | None = None

    def check(self, adapter: Mapping[str, LoraPair]) -> None:
        """Raise RequestError where the adapter does not fit the model, naming the layer."""
        for layer, pair in adapter.items():
            place = self._places.get(layer)
            if place is None:
                raise RequestError(f"the adapter changes {layer}, which is no linear layer of this model")
            given = (pair.down.shape[1], pair.up.shape[0])
            if given != (place.in_features, place.last - place.first):
                raise RequestError(
                    f"the adapter takes {layer} for a layer of {given[0]} inputs and {given[1]} outputs;"
                    f" this model's has {place.in_features} and {place.last - place.first}"
                )

    def load(self, adapter: Mapping[str, LoraPair]) -> LoraWeights:
        """Lay an adapter that `check` accepts out for this model."""
        pairs: dict[nn.Module, list[tuple[LoraTarget, LoraPair]]] = {}
        for layer, pair in adapter.items():
            place = self._places[layer]
            pairs.setdefault(place.module, []).append((place, pair))
        return LoraWeights({module: self._lay_out(parts) for module, parts in pairs.items()})

    def _lay_out(self, parts: list[tuple[LoraTarget, LoraPair]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Join what an adapter adds to the layers that one module computes."""
        down = torch.cat([pair.down for _, pair in parts])
        up = torch.zeros((down.shape[0], parts[0][0].out_features))
        rank = 0
        for place, pair in parts:
            up[rank : rank + pair.down.shape[0], place.first : place.last] = pair.scaling * pair.up.float().T
            rank += pair.down.shape[0]
        return down.to(self._device, self._dtype), up.to(self._device, self._dtype)

    def forget(self, weights: LoraWeights) -> None:
        """Let go of an adapter's stacks; sequences that still run with it have them built again."""
        if weights in self._stacked:
            self._unstack()

    def begin(self, adapters: Sequence[LoraWeights | None], kept: Sequence[int]) -> None:
        """Tell the adapter of each row of the pass that comes, and which rows get logits."""
        needed = {adapter for adapter in adapters if adapter is not None}
        if not needed:
            self._rows = self._head_rows = None
            self._unhook()
            return
        if not needed <= self._stacked.keys() or _ranks(self._stacked) > _MOST_IDLE_RANKS * _ranks(needed):
            self._stack(needed)
        if not self._hooks:
            self._hooks = [module.register_forward_hook(adder) for module, adder in self._adders.items()]
        places = [-1 if adapter is None else self._stacked[adapter] for adapter in adapters]
        self._rows = self._rows_of(places)
        self._head_rows = self._rows if self._head is None else self._rows_of([places[row] for row in kept])

    def _rows_of(self, places: list[int]) -> _Rows | None:
        index = [row for row, place in enumerate(places) if place >= 0]
        if not index:
            return None
        owners = [places[row] for row in index]
        padded = self._pad(index)
        owners += [-1] * (len(padded) - len(index))
        return _Rows(
            torch.tensor(padded, device=self._device),
            torch.tensor(owners, device=self._device)[:, None],
        )

    def _stack(self, adapters: set[LoraWeights]) -> None:
        self._unstack()
        self._stacked = {adapter: place for place, adapter in enumerate(adapters)}
        modules = dict.fromkeys(module for adapter in adapters for module in adapter.layers)
        self._adders = {module: self._adder(self._stack_of(module), module is self._head) for module in modules}

    def _stack_of(self, module: nn.Module) -> _Stack:
        parts = [
            (place, *adapter.layers[module]) for adapter, place in self._stacked.items() if module in adapter.layers
        ]
        owners = tuple(place for place, down, _ in parts for _ in range(down.shape[0]))
        downs, ups = [down for _, down, _ in parts], [up for _, _, up in parts]
        if len(parts) == 1:
            return _Stack(downs[0].T, ups[0], owners)
        return _Stack(torch.cat(downs).T, torch.cat(ups), owners)

    def _unstack(self) -> None:
        self._unhook()
        self._adders, self._stacked = {}, {}

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _adder(self, stack: _Stack, is_head: bool) -> _Adder:
        def add(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            rows = self._head_rows if is_head else self._rows
            if rows is None:
                return
            hidden = inputs[0].flatten(0, -2).index_select(0, rows.index)
            low = (hidden @ stack.down).mul_(rows.mask(stack.owners, hidden.dtype))
            output.flatten(0, -2).index_add_(0, rows.index, low @ stack.up)

        return add


def _ranks(adapters: Any) -> int:
    return sum(adapter.ranks for adapter in adapters)

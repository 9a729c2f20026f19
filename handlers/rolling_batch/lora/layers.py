"""LoRA adapters in the rolling batch: each row of the flat pass gets the low-rank update of its own adapter.

The matrices of all adapters in the batch are stacked along their ranks (as in S-LoRA, Sheng et al., 2024). A linear
layer then needs two small products for all adapters together; between the two, for each row, the ranks of the other
adapters are replaced by zeros (a product with zero would keep NaN and infinity). Rows without an adapter are left out
of the products, and if no row has one, there are no hooks and the model runs as fast as without adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from handlers.checkpoints.adapter_layers import DOWN, PREFIX, UP, Widths, refuse_foreign, refuse_infinite
from handlers.checkpoints.placement import main_device, module_device
from handlers.rolling_batch.device_arrays import upload
from handlers.rolling_batch.lora.bank import AdapterBank
from handlers.rolling_batch.lora.targets import LoraTarget, head_modules, lora_targets

logger = logging.getLogger(__name__)

_Adder = Callable[[nn.Module, tuple[torch.Tensor], torch.Tensor], None]

_MAX_IDLE_RANKS = 4  # a stack with more than so many times the ranks that the batch needs is built anew


@dataclass(frozen=True)
class LoraPair:
    """What an adapter adds to a weight (out, in): `scaling * up @ down`, of shapes (out, rank) and (rank, in)."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float


@dataclass(eq=False)
class LoraWeights:
    """An adapter in the layout of the fused modules: for each the matrices (ranks, in) and (ranks, out), scaled.

    `is_forgotten`: it was removed: nothing of it is kept beyond its requests.
    """

    layers: Mapping[nn.Module, tuple[torch.Tensor, torch.Tensor]]
    is_forgotten: bool = False

    @property
    def ranks(self) -> int:
        """Return the rank of the largest matrix."""
        return max(int(down.shape[0]) for down, _ in self.layers.values())


@dataclass(frozen=True, eq=False)
class _Stack:
    """The matrices of several adapters in one module; `owners` has, for each rank, the place of its adapter."""

    down: torch.Tensor  # (in, ranks)
    up: torch.Tensor  # (ranks, out)
    owners: tuple[int, ...]


@dataclass(eq=False)
class _Rows:
    """The rows of a pass that have an adapter, the `last` of them, and the place of each row's adapter.

    It is -1 for padding.
    """

    index: torch.Tensor
    owners: torch.Tensor  # (rows, 1)
    last: int
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    copies: dict[torch.device, _Rows] = field(default_factory=dict)  # for layers on other devices

    def on(self, device: torch.device) -> _Rows:
        """Return the same rows for a layer on `device`."""
        if device == self.index.device:
            return self
        if device not in self.copies:
            self.copies[device] = _Rows(self.index.to(device), self.owners.to(device), self.last)
        return self.copies[device]

    def foreign(self, owners: tuple[int, ...]) -> torch.Tensor:
        """Return (rows, ranks): whether the rank belongs to another adapter than the row's."""
        mask = self.masks.get(owners)
        if mask is None:
            mask = self.masks[owners] = self.owners != upload(owners, self.owners.device)
        return mask


class LoraLayers:
    """Adds the updates of adapters to the outputs of the linear layers of `model`, with a forward hook on each.

    `scored_rows_only`: the model computes logits for the rows that `begin` gets as `kept` only. `pad` adds rows, so
    that few different numbers of rows occur. `unread` are layers that the model never calls: it reads their weights.
    """

    def __init__(
        self,
        model: Any,
        scored_rows_only: bool,
        pad: Callable[[list[int]], list[int]],
        unread: frozenset[nn.Module] = frozenset(),
    ) -> None:
        self._targets = lora_targets(model)
        self._head = head_modules(model) if scored_rows_only else frozenset()
        self._device = main_device(model)
        self._dtype: torch.dtype = model.dtype
        self._pad = pad
        self._unread = unread
        self._stacked: dict[LoraWeights, int] = {}  # adapters in the stacks, by place
        self._adders: dict[nn.Module, _Adder] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []  # empty if no row of the pass has an adapter
        self._rows: _Rows | None = None  # of the current pass; None if no row has an adapter
        self._places: list[int] = []  # of the adapters of all rows of the pass, -1 for none
        self._parts: dict[
            tuple[int, int], _Rows | None
        ] = {}  # of the pass, by their first row and that behind the last
        self._head_rows: _Rows | None = None
        self.bank: AdapterBank | None = None  # None: no step with adapters is recorded

    @property
    def is_active(self) -> bool:
        """Whether a row of the pass has an adapter."""
        return bool(self._hooks)

    def check(self, adapter: Mapping[str, LoraPair]) -> None:
        """Raise RequestError, naming layer or tensor, if the adapter does not fit the model or is not finite."""
        refuse_foreign(
            {layer: Widths(pair.down.shape[1], pair.up.shape[0]) for layer, pair in adapter.items()},
            {layer: target.widths for layer, target in self._targets.items()},
        )
        for layer, pair in adapter.items():
            refuse_infinite(f"{PREFIX}{layer}{DOWN}", pair.down, self._dtype)
            refuse_infinite(f"{PREFIX}{layer}{UP}", pair.up, self._dtype, pair.scaling)
        unread = [layer for layer in adapter if self._targets[layer].module in self._unread]
        if unread:
            logger.warning(
                "an adapter has no effect on %d layers, %s among them: the model reads their weights without calling"
                " them, as under peft",
                len(unread), unread[0],
            )  # fmt: skip

    def load(self, adapter: Mapping[str, LoraPair]) -> LoraWeights:
        """Return an adapter that `check` accepts in the layout of this model's modules."""
        pairs: dict[nn.Module, list[tuple[LoraTarget, LoraPair]]] = {}
        for layer, pair in adapter.items():
            target = self._targets[layer]
            pairs.setdefault(target.module, []).append((target, pair))
        return LoraWeights({module: self._lay_out(module, parts) for module, parts in pairs.items()})

    def _lay_out(
        self, module: nn.Module, parts: list[tuple[LoraTarget, LoraPair]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the matrices of all layers that `module` computes, each on its own ranks and output columns."""
        down = torch.cat([pair.down for _, pair in parts])
        up = torch.zeros((down.shape[0], parts[0][0].out_features))
        rank = 0
        for target, pair in parts:
            up[rank : rank + pair.down.shape[0], target.first : target.last] = pair.scaling * pair.up.float().T
            rank += pair.down.shape[0]
        device = module_device(module, self._device)
        return down.to(device, self._dtype), up.to(device, self._dtype)

    def forget(self, weights: LoraWeights) -> None:
        """Drop the stacks with an adapter. For sequences that still run with it they are built again."""
        weights.is_forgotten = True
        if weights in self._stacked:
            self._unstack()

    def begin(self, adapters: Sequence[LoraWeights | None], kept: Sequence[int]) -> None:
        """Set the adapter of each row of the next pass, and which rows get logits."""
        needed = {adapter for adapter in adapters if adapter is not None}
        if any(weights.is_forgotten and weights not in needed for weights in self._stacked):
            self._unstack()
        if not needed:
            self._rows = self._head_rows = None
            self._unhook()
            return
        if not needed <= self._stacked.keys() or _ranks(self._stacked) > _MAX_IDLE_RANKS * _ranks(needed):
            self._stack(needed)
        if not self._hooks:
            self._hooks = [module.register_forward_hook(adder) for module, adder in self._adders.items()]
        self._places = places = [-1 if adapter is None else self._stacked[adapter] for adapter in adapters]
        self._parts = {}
        self._rows = self._rows_of(places)
        self._head_rows = self._rows if not self._head else self._rows_of([places[row] for row in kept])

    def begin_recorded(
        self, bank: AdapterBank, adapters: Sequence[LoraWeights | None], kept: Sequence[int] | None
    ) -> AdapterBank:
        """Set the adapter of each row of the next pass, which is recorded; return `bank`, which adds their updates.

        `kept`: which rows get logits, None for all. Raises torch.OutOfMemoryError.
        """
        self._unhook()
        bank.heads = self._head
        bank.begin(adapters, kept)
        return bank

    def enter(self, first: int, last: int) -> None:
        """Let the next layers compute rows `first:last` of the pass, and not all of them."""
        if not self._hooks:
            return
        if (first, last) not in self._parts:
            self._parts[first, last] = self._rows_of(self._places[first:last])
        self._rows = self._parts[first, last]

    def _rows_of(self, places: list[int]) -> _Rows | None:
        index = [row for row, place in enumerate(places) if place >= 0]
        if not index:
            return None
        owners = [places[row] for row in index]
        padded = self._pad(index)
        owners += [-1] * (len(padded) - len(index))
        return _Rows(
            upload(padded, self._device),
            upload(owners, self._device)[:, None],
            index[-1],
        )

    def _stack(self, adapters: set[LoraWeights]) -> None:
        self._unstack()
        self._stacked = {adapter: place for place, adapter in enumerate(adapters)}
        modules = dict.fromkeys(module for adapter in adapters for module in adapter.layers)
        self._adders = {module: self._adder(self._stack_of(module), module in self._head) for module in modules}

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
            rows = rows.on(stack.down.device)
            given = inputs[0].flatten(0, -2)
            if len(given) <= rows.last and not given.any():
                return  # zeros in place of what comes before the first token (Zaya): an adapter adds nothing to them
            hidden = given.index_select(0, rows.index)
            low = (hidden @ stack.down).masked_fill_(rows.foreign(stack.owners), 0)
            output.flatten(0, -2).index_add_(0, rows.index, low @ stack.up)

        return add


def _ranks(adapters: Any) -> int:
    return sum(adapter.ranks for adapter in adapters)

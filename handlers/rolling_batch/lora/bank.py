"""LoRA adapters in recorded steps: matrices at fixed addresses; each row takes the matrices of a place.

A recorded step reads what lies at the addresses of its recording. So the matrices of the adapters in use are copied to
places of a bank, and a step gets the number of a place for each of its rows (as in Punica, Chen et al., 2023). The bank
grows when more adapters or larger ones are in use; then steps are recorded anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from handlers.rolling_batch.device_arrays import upload

_MIN_PLACES, _RANK_STEP = 4, 16


class Adapter(Protocol):
    """What the bank needs of an adapter: for each module the matrices (ranks, in) and (ranks, out)."""

    @property
    def layers(self) -> Mapping[nn.Module, tuple[torch.Tensor, torch.Tensor]]: ...


@dataclass(eq=False)
class _Matrices:
    """Those of a module: `down` is (places, ranks, in), `up` is (places, ranks, out)."""

    down: torch.Tensor
    up: torch.Tensor

    def put(self, place: int, pair: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Copy the matrices of an adapter to its place, with zeros in what it leaves."""
        for kept, given in zip((self.down, self.up), pair or (None, None), strict=True):
            ranks = 0 if given is None else len(given)
            kept[place, ranks:].zero_()
            if given is not None:
                kept[place, :ranks].copy_(given)


@dataclass(eq=False)
class AdapterBank:
    """The adapters of recorded steps of up to `rows` rows. `version` changes when steps have to be recorded anew."""

    rows: int
    device: torch.device
    version: int = 0
    heads: Set[nn.Module] = frozenset()  # modules that compute the rows to keep alone
    places: torch.Tensor = field(init=False)  # of the rows, (rows,) int32; -1 for none
    kept_places: torch.Tensor = field(init=False)  # the same for `heads`
    # Place by adapter, the least recently needed first. A removed adapter goes with the last request that has it.
    _held: WeakKeyDictionary[Adapter, int] = field(default_factory=WeakKeyDictionary)
    _matrices: dict[nn.Module, _Matrices] = field(default_factory=dict)
    _capacity: int = 0

    def __post_init__(self) -> None:
        self.places, self.kept_places = (
            torch.full((self.rows,), -1, dtype=torch.int32, device=self.device) for _ in range(2)
        )

    def begin(self, adapters: Sequence[Adapter | None], kept: Sequence[int] | None = None) -> None:
        """Set the adapters of the first rows of the next pass; others may repeat the last one, and have its.

        `kept` are the rows that `heads` compute, None for all of them.
        """
        needed = dict.fromkeys(adapter for adapter in adapters if adapter is not None)
        with torch.inference_mode():
            if not self._has_room(needed):
                self._grow(needed)
            held = self._hold(needed)
            own = [-1 if adapter is None else held[adapter] for adapter in adapters]
            kept_own = own if kept is None else [own[row] for row in kept]
            for places, numbers in ((self.places, own), (self.kept_places, kept_own)):
                # A chunk that does not complete its prompt keeps no row.
                padded = np.array(numbers + (numbers[-1:] or [-1]) * (self.rows - len(numbers)), np.int32)
                places.copy_(upload(padded, self.device), non_blocking=True)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Add the updates of the adapters to what the modules return."""
        handles = [module.register_forward_hook(self._adder(module, kept)) for module, kept in self._matrices.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _adder(self, owner: nn.Module, kept: _Matrices) -> object:
        places = self.kept_places if owner in self.heads else self.places

        def add(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            given = inputs[0].flatten(0, -2)
            add_updates(given, output.flatten(0, -2), kept.down, kept.up, places[: len(given)])

        return add

    def _has_room(self, needed: Mapping[Adapter, None]) -> bool:
        if len(needed) > self._capacity:
            return False
        for adapter in needed:
            for module, (down, _) in adapter.layers.items():
                if module not in self._matrices or self._matrices[module].down.shape[1] < len(down):
                    return False
        return True

    def _hold(self, needed: Mapping[Adapter, None]) -> dict[Adapter, int]:
        """Return the places of adapters; those without one get free ones, or ones that this pass does not need."""
        places = {}
        free = sorted(set(range(self._capacity)) - set(self._held.values()))
        for adapter in needed:
            place = self._held.pop(adapter, None)
            if place is None:
                place = free.pop() if free else self._held.pop(next(old for old in self._held if old not in needed))
                for module, kept in self._matrices.items():
                    kept.put(place, adapter.layers.get(module))
            self._held[adapter] = places[adapter] = place
        return places

    def _grow(self, needed: Mapping[Adapter, None]) -> None:
        """Make room for these adapters, and forget all others."""
        self.version += 1
        self._held.clear()
        ranks = {module: kept.down.shape[1] for module, kept in self._matrices.items()}
        widths: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        for adapter in needed:
            for module, pair in adapter.layers.items():
                ranks[module] = max(ranks.get(module, 0), -(-len(pair[0]) // _RANK_STEP) * _RANK_STEP)
                widths[module] = pair
        # Without their memory, which is free for the larger ones then.
        widths |= {
            module: (kept.down.new_empty((0, kept.down.shape[2])), kept.up.new_empty((0, kept.up.shape[2])))
            for module, kept in self._matrices.items()
        }
        self._capacity = max(_MIN_PLACES, self._capacity, 1 << (len(needed) - 1).bit_length())
        self._matrices.clear()
        for module, pair in widths.items():
            shape = (self._capacity, ranks[module])
            self._matrices[module] = _Matrices(*(like.new_zeros((*shape, like.shape[1])) for like in pair))


def add_updates(
    given: torch.Tensor, output: torch.Tensor, down: torch.Tensor, up: torch.Tensor, places: torch.Tensor
) -> None:
    """Add to each row of `output`, (rows, out), the update of the adapter in its place for `given`, (rows, in).

    `down` is (places, ranks, in), `up` (places, ranks, out); rows in place -1 stay.
    """
    if given.device.type == "cuda":
        from handlers.rolling_batch.lora.kernels import add_updates_on_gpu

        add_updates_on_gpu(given, output, down, up, places)
        return
    own = places.long().clamp_min(0)
    low = torch.einsum("ri,rki->rk", given, down[own])
    output += torch.einsum("rk,rko->ro", low, up[own]) * (places >= 0)[:, None]

"""How a mixer takes its state and gives it back: one class for each way that transformers has.

A mixer is a module that mixes tokens by a state of fixed size instead of keys and values: a state-space model, a gated
delta net, a short convolution. Its states are a list of tensors, (sequences, ...) each.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import LinearAttentionLayer

from handlers.rolling_batch.states.scans import ContinuedScan, with_continued_scan

_MAX_STATES = 16  # of one kind in one layer

Call = tuple[tuple[Any, ...], dict[str, Any]]
Computed = tuple[Any, list[torch.Tensor]]


@dataclass(frozen=True)
class StateShape:
    """One tensor of a sequence's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


class Form(Protocol):
    """Calls a mixer for sequences with their states.

    `by_token`: the mixer continues from a state by one token at a time only.
    """

    by_token: bool

    def shapes(self) -> list[StateShape]:
        """Return the tensors of one sequence's state, once the mixer was recorded."""
        ...

    def call(self, call: Call, states: list[torch.Tensor] | None) -> Computed:
        """Return the output for a call, and the states behind it; None stands for sequences at their beginning."""
        ...


# --- an argument that is a cache of transformers ---


class _Always:
    """The layers of a cache that has one layer alone, whatever number a mixer knows it by."""

    def __init__(self, layer: LinearAttentionLayer) -> None:
        self._layer = layer

    def __getitem__(self, index: int) -> LinearAttentionLayer:
        return self._layer


class LayerCache:
    """What a mixer takes for the model's cache: the states of its own layer.

    The methods are those of transformers' `Cache` called by mixers, and of MiniMax's own cache.
    """

    def __init__(self) -> None:
        self.layer = LinearAttentionLayer(number_of_states=_MAX_STATES)
        self.layers = _Always(self.layer)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        previous: Mapping[int, bool] = self.layer.has_previous_state
        return any(previous.values()) if state_idx is None else previous[state_idx]

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **more: Any
    ) -> torch.Tensor:
        return self.layer.update_conv_state(conv_states, state_idx, **more)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **more: Any
    ) -> torch.Tensor:
        return self.layer.update_recurrent_state(recurrent_states, state_idx, **more)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.layer.recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.layer.update_recurrent_state(linear_cache)

    def states(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield the kind and the number of each state that was written, and the state."""
        for kind in ("conv", "recurrent"):
            for number, state in getattr(self.layer, f"{kind}_states").items():
                if state is not None:
                    yield kind, number, state

    def put(self, kind: str, number: int, state: torch.Tensor) -> None:
        """Set a state as if the tokens before had written it."""
        layer = self.layer
        getattr(layer, f"{kind}_states")[number] = state
        getattr(layer, f"is_{kind}_states_initialized")[number] = True
        layer.has_previous_state[number] = True
        if kind == "conv":
            layer.conv_kernel_size[number] = state.shape[-1]
        layer.device, layer.dtype = state.device, state.dtype


class CacheForm:
    """A mixer that takes a cache as an argument: most architectures."""

    by_token = False

    def __init__(self, module: Any, place: int | str) -> None:
        self._place = place  # of the cache among the arguments
        scan = with_continued_scan(module)
        self._forward: Callable[..., Any] = module.forward if scan is None else scan.forward
        self._scan: ContinuedScan | None = scan
        self._written: list[tuple[str, int, StateShape]] = []

    def record(self, cache: LayerCache) -> None:
        """Learn the parts of a state from the cache of one sequence after the mixer wrote to it."""
        self._written = [
            (kind, number, StateShape(tuple(state.shape[1:]), state.dtype, state.device))
            for kind, number, state in cache.states()
        ]

    def shapes(self) -> list[StateShape]:
        return [shape for _, _, shape in self._written]

    def call(self, call: Call, states: list[torch.Tensor] | None) -> Computed:
        cache = LayerCache()
        for (kind, number, _), state in zip(self._written, states or (), strict=False):
            cache.put(kind, number, state)
        args, kwargs = _with(call, self._place, cache)
        if self._scan is not None:
            self._scan.begin(cache.layer.recurrent_states[0])
        out = self._forward(*args, **kwargs)
        return out, [getattr(cache.layer, f"{kind}_states")[number] for kind, number, _ in self._written]


def _with(call: Call, place: int | str, value: Any) -> Call:
    """Return the call with one argument replaced."""
    args, kwargs = call
    if isinstance(place, str):
        return args, {**kwargs, place: value}
    return (*args[:place], value, *args[place + 1 :]), kwargs


# --- families with ways of their own ---


class RwkvForm:
    """RWKV's two mixers of a layer take a list of five states, in which each layer has a column."""

    by_token = False

    def __init__(self, module: Any, kept: tuple[int, ...]) -> None:
        self._forward, self._kept = module.forward, kept
        weight = module.key.weight
        # The third to fifth are sums of exponentials: numerator, denominator, and the exponent that both leave out.
        self._shapes = {
            number: StateShape((weight.shape[1],), weight.dtype if number <= 1 else torch.float32, weight.device)
            for number in kept
        }

    def shapes(self) -> list[StateShape]:
        return list(self._shapes.values())

    def call(self, call: Call, states: list[torch.Tensor] | None) -> Computed:
        args, kwargs = call
        given = self._beginning(args[0].shape[0]) if states is None else states
        columns = [_Column(torch.empty(0)) for _ in range(5)]
        for number, state in zip(self._kept, given, strict=True):
            # A single token is mixed with the one before it in a way that is right for one sequence alone.
            columns[number] = _Column(state, has_rows=number <= 1 and args[0].shape[1] == 1)
        caching = {"use_cache": True} if len(self._kept) > 1 else {}
        out, _ = self._forward(*args, **{**kwargs, **caching, "state": columns})
        return (out, None), [columns[number].state for number in self._kept]

    def _beginning(self, sequences: int) -> list[torch.Tensor]:
        return [
            torch.full((sequences, *shape.shape), -1e30 if number == 4 else 0.0, dtype=shape.dtype, device=shape.device)
            for number, shape in self._shapes.items()
        ]


class _Column:
    """A tensor of states, (sequences, width, layers), that has the column of one layer alone.

    `has_rows`: it is read as (sequences, 1, width).
    """

    def __init__(self, state: torch.Tensor, has_rows: bool = False) -> None:
        self.state = state
        self._has_rows = has_rows

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.state[:, None] if self._has_rows else self.state

    def __setitem__(self, place: Any, state: torch.Tensor) -> None:
        self.state = state.to(self.state.dtype)


class XlstmForm:
    """xLSTM's layers take a tuple of states behind their input, and return the next ones behind their output."""

    by_token = False

    def __init__(self, module: Any) -> None:
        self._forward = module.forward
        # Beyond so many tokens the model computes them part by part, as if they were one sequence.
        module.config.max_inference_chunksize = sys.maxsize
        weight = module.out_proj.weight
        with torch.inference_mode():
            _, states = self._forward(weight.new_zeros(1, 1, weight.shape[0]), None)
        # transformers keeps them in the type of the activations, whatever type computes them.
        self._shapes = [StateShape(tuple(state.shape[1:]), weight.dtype, weight.device) for state in states]

    def shapes(self) -> list[StateShape]:
        return self._shapes

    def call(self, call: Call, states: list[torch.Tensor] | None) -> Computed:
        hidden = call[0][0]
        out, after = self._forward(hidden, tuple(states or _zeros(self._shapes, hidden.shape[0])))
        return (out, None), list(after)


class GriffinForm:
    """The recurrent blocks of RecurrentGemma keep their states as attributes, and convolve prompts from the start."""

    by_token = True

    def __init__(self, module: Any) -> None:
        self._module, self._forward = module, module.forward
        weight, width = module.linear_x.weight, module.lru_width
        self._shapes = [
            StateShape((width, module.conv1d_width - 1), weight.dtype, weight.device),
            StateShape((width,), torch.float32, weight.device),
        ]

    def shapes(self) -> list[StateShape]:
        return self._shapes

    def call(self, call: Call, states: list[torch.Tensor] | None) -> Computed:
        args, kwargs = call
        module = self._module
        module.conv1d_state, module.rg_lru.recurrent_states = states or _zeros(self._shapes, args[0].shape[0])
        out = self._forward(*args, **{**kwargs, "use_cache": True})
        after = [module.conv1d_state, module.rg_lru.recurrent_states]
        module.conv1d_state = module.rg_lru.recurrent_states = None
        return out, after


def _zeros(shapes: list[StateShape], sequences: int) -> list[torch.Tensor]:
    return [torch.zeros((sequences, *shape.shape), dtype=shape.dtype, device=shape.device) for shape in shapes]


def own_forms(model: Any) -> dict[Any, Form]:
    """Return the mixers that take no cache, with their forms."""
    found: dict[Any, Form] = {}
    for module in model.modules():
        if hasattr(module, "rg_lru") and hasattr(module, "conv1d_state"):
            found[module] = GriffinForm(module)
        elif hasattr(module, "mlstm_backend"):
            found[module] = XlstmForm(module)
        elif type(module).__name__ == "RwkvSelfAttention":
            found[module] = RwkvForm(module, (1, 2, 3, 4))
        elif type(module).__name__ == "RwkvFeedForward":
            found[module] = RwkvForm(module, (0,))
    return found

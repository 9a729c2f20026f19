"""What a model is given for a flat pass: token ids, their positions, and the arguments of models that count positions.

Some models count positions from the length of their cache, as if the rows of a pass followed it in a row: BART's
decoders for all positions, Llama 4 for the temperature of layers without rotary embeddings. They get a cache that holds
nothing; its length is one number per row, such that row i, counted from it, is at the row's own position.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache

_CACHE, _MASK = "past_key_values", "attention_mask"


class PassCache(Cache):
    """The cache of one pass: keys and values go through it unchanged, to an attention function that keeps them."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__(layers=[])
        self._positions = positions  # (rows,)
        self.was_asked = False

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return, (rows,), how many tokens of its own sequence come before a row, less the rows above it."""
        self.was_asked = True
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the rows as they are."""
        return key_states, value_states


class PassInputs:
    """Makes the keyword arguments of flat passes of a model. `find` chooses which it needs."""

    def __init__(self, model: Any) -> None:
        self._positions = "position_ids" in _accepted(model)
        self._extra: tuple[str, ...] = ()

    def find(self, model: Any, ids: torch.Tensor, counts_alone: bool = True) -> None:
        """Run the tokens `ids`, (1, rows), and choose the inputs with which the model computes them.

        `counts_alone`: of its cache the model may want the length, but no states. A model that wants nothing of it is
        left to the caller to run with ids and positions alone.
        """
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        for extra in ((_CACHE,), (_CACHE, _MASK)) if counts_alone else ():
            self._extra = extra
            inputs = self(ids, places)
            try:
                model(**inputs)
            # It may want from a cache what this one has not; the model shows below whether it does without one.
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
                continue
            if inputs[_CACHE].was_asked:
                return
            break
        self._extra = ()

    def __call__(self, ids: torch.Tensor, places: torch.Tensor) -> dict[str, Any]:
        """Return the inputs for token ids and positions, both (1, rows)."""
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self._positions:
            inputs["position_ids"] = places
        if _CACHE in self._extra:
            inputs[_CACHE] = PassCache(places[0])
        if _MASK in self._extra:
            inputs[_MASK] = torch.ones_like(ids)
        return inputs


def _accepted(model: Any) -> set[str]:
    """Return the names of what the model's forward takes; `position_ids` if it takes any."""
    parameters = inspect.signature(model.forward).parameters
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {*parameters, *(["position_ids"] if open_ended else [])}

"""Passes of a model that is called as `generate` of transformers calls it: with a cache, sequence by sequence.

A flat pass needs a model that leaves attention to a given function. Others compute it on their own: with a bias by
distance (Bloom, MPT), with two softmaxes (DiffLlama), over tokens chosen by an index (DeepSeek V3.2), or in code older
than that interface (GPT-J). Of them every prompt chunk is a call of its own, and all decoding sequences together are
one, padded on the left. If padding changes what the model computes, each of them is a call.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from handlers.checkpoints.placement import main_device
from handlers.rolling_batch.attention.kv_cache import KVCache, LayerShape
from handlers.rolling_batch.attention.probe import UnsupportedAttentionError
from handlers.rolling_batch.attention.rows import StepRows
from handlers.rolling_batch.sequences.slot_cache import CalledSequences, SlotCache, cache_layout

CODE_ERRORS = (
    UnsupportedAttentionError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
)
"""What the code of a model raises that misses something: a cache, a mask, an input."""

_TOKENS = 3  # of the prompt that shows what a model keeps


class SequencePasses:
    """Computes passes of `model`. `together`: sequences that decode share a call."""

    takes_pages = False  # the KV cache has slots
    states = None  # such a model keeps none

    def __init__(self, model: Any, implementation: str) -> None:
        """Run a short prompt with the attention function of a name; see what the model keeps.

        Raises UnsupportedAttentionError if that is more than keys, values and keys of an index.
        """
        model.set_attn_implementation(implementation)
        self._model = model
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._device = main_device(model)
        cache = DynamicCache(config=model.config)
        ids = torch.zeros((1, _TOKENS), dtype=torch.long, device=self._device)
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        self._layout = cache_layout(cache, model.dtype)
        self._cache: KVCache
        self.together = True

    @property
    def shapes(self) -> list[LayerShape]:
        """What each area of the KV cache keeps per token."""
        return self._layout.shapes

    def measure(self, rows: int) -> None:
        """Compute `rows` rows without a KV cache."""
        with torch.inference_mode():
            self._model(input_ids=torch.zeros((1, rows), dtype=torch.long, device=self._device), use_cache=False)

    def use(self, cache: KVCache) -> None:
        """Keep keys and values in `cache`, which was made for `shapes`."""
        self._cache = cache

    def row_by_row(self, start: int, end: int) -> bool:
        """Whether a chunk of tokens `start:end` attends row by row, like decode rows: none does."""
        return False

    def logits(
        self,
        token_ids: Sequence[int],
        rows: StepRows,
        keep: Sequence[int],
        begin: Callable[[list[int], list[int]], None],
    ) -> torch.Tensor:
        """Return the logits of the rows `keep`, (rows, vocabulary).

        Before each call `begin` gets its rows of the pass, and the ones among them with logits.
        """
        found: dict[int, torch.Tensor] = {}
        wanted = set(keep)
        logits = torch.empty(0)
        for first, called in self._calls(rows):
            own = list(range(first, first + len(called.slots) * called.new))
            kept = [row for row in own if row in wanted] or own[-1:]
            begin(own, [row - first for row in kept])
            logits = self._call(token_ids[first : own[-1] + 1], called, [row - first for row in kept])
            found.update(zip(kept, logits, strict=True))
        return torch.stack([found[row] for row in keep]) if keep else logits[:0]

    def _calls(self, rows: StepRows) -> Iterator[tuple[int, CalledSequences]]:
        """Yield the first row of each call, and its sequences."""
        slots, positions = rows.slots.tolist(), rows.positions.tolist()
        singles = _runs(slots)
        lengths = {last - first for first, last in singles}
        if self.together and lengths == {1}:
            yield 0, CalledSequences(slots, positions, 1)
        else:
            for first, last in singles:
                yield first, CalledSequences([slots[first]], [positions[first]], last - first)
        for chunk in rows.chunks:
            yield chunk.first, CalledSequences([chunk.slot], [chunk.start], chunk.end - chunk.start)

    def _call(self, ids: Sequence[int], called: CalledSequences, kept: list[int]) -> torch.Tensor:
        """Return the logits of the rows `kept` of a call."""
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(ids, device=self._device).view(len(called.slots), called.new),
            "past_key_values": SlotCache(self._layout, self._cache, called),
            "use_cache": True,
        }
        if (mask := called.mask(self._device)) is not None:
            inputs["attention_mask"] = mask
        if "position_ids" in self._accepted:
            inputs["position_ids"] = called.positions(self._device)
        with torch.inference_mode():
            if "logits_to_keep" in self._accepted and called.new > 1:
                return self._model(**inputs, logits_to_keep=np.array(kept)).logits[0]
            logits = self._model(**inputs).logits
        return logits.flatten(0, 1)[kept]


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last row, exclusive, of neighbours with the same slot: a token and those drafted."""
    begins = [row for row in range(len(slots)) if row == 0 or slots[row] != slots[row - 1]]
    return list(itertools.pairwise([*begins, len(slots)]))

"""What a decode pass looks up for each row: the embedding of its token, and the rotary angles of its position.

A pass of the project's kernels needs no OpenMP but for these two, which torch shares out to its threads from some
dozens of rows on. On a machine whose cores have other work as well that took a tenth of a step of 64 rows: each
operation waits for its slowest thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from handlers.checkpoints.blocks.formats import Q8_0
from handlers.checkpoints.blocks.layers import StoredEmbedding
from handlers.cpu_kernels.arrays import as_numpy

Embed = Callable[[np.ndarray], np.ndarray]
"""Token ids (n,) int64 -> their embeddings (n, width)."""

_SECTION = 1024  # positions that are computed at once
_Q8_0 = np.dtype([("scale", np.float16), ("numbers", np.int8, 32)])


def embedding_rows(module: Any) -> Embed:
    """Return what looks up embeddings of a module: in its weight if it does nothing else, otherwise by calling it."""
    is_plain = type(module) is nn.Embedding and "forward" not in vars(module) and module.max_norm is None
    is_hooked = module._forward_pre_hooks or module._forward_hooks
    if is_plain and not is_hooked:
        table = as_numpy(module.weight.detach())
        return lambda ids: table.take(ids, axis=0)
    is_stored = type(module) is StoredEmbedding and module.dtype == torch.bfloat16
    if is_stored and not is_hooked and module.stored.format is Q8_0:
        raw = module.stored.raw.numpy()
        return lambda ids: _unpacked(raw.take(ids, axis=0))
    return lambda ids: as_numpy(module(torch.from_numpy(ids)[None])[0])


def _unpacked(raw: np.ndarray) -> np.ndarray:
    """Rows of Q8_0 (n, bytes) -> (n, width) of bfloat16, rounded to nearest, ties to even.

    torch would have a dozen operators to run, whose code no cache holds after a step.
    """
    blocks = raw.view(_Q8_0)
    with np.errstate(invalid="ignore"):  # of a damaged file
        weights = blocks["numbers"] * blocks["scale"].astype(np.float32)[..., None]
    bits = weights.reshape(len(raw), -1).view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)


class RotaryTable:
    """Cosines and sines of rotary position embeddings by position, each (positions, dim) in the model's type.

    `rotary` is transformers' module. Its angles must not depend on the other positions of a pass, as with the types
    "dynamic" and "longrope" beyond the trained length. The engine refuses such lengths. Angles are computed when a
    position is first needed, a section of positions at once.
    """

    def __init__(self, rotary: Any, positions: int, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._positions = positions
        self._like = torch.empty(0, dtype=dtype)  # tells the module which type to return
        self._known = 0  # positions whose angles are known
        self._cosines = self._sines = np.empty((0, 0))

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions (n,) int64 -> cosines and sines, (n, dim) each."""
        highest = int(positions.max())
        while self._known <= highest:
            self._extend()
        return self._cosines.take(positions, axis=0), self._sines.take(positions, axis=0)

    def _extend(self) -> None:
        begin, end = self._known, min(self._known + _SECTION, self._positions)
        found = self._rotary(self._like, torch.arange(begin, end)[None])
        cosines, sines = (as_numpy(part[0]) for part in found)
        if not begin:
            # Memory that is not touched is not taken: most servers never see the longest context.
            self._cosines, self._sines = (
                np.empty((self._positions, part.shape[1]), part.dtype) for part in (cosines, sines)
            )
        self._cosines[begin:end], self._sines[begin:end] = cosines, sines
        self._known = end

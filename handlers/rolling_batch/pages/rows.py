"""What the rows of a forward pass are, for attention over pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from handlers.rolling_batch.attention.rows import ChunkRows, StepRows
from handlers.rolling_batch.attention.torch_attention import SingleRows
from handlers.rolling_batch.device_arrays import upload


@dataclass(frozen=True, eq=False)
class PageRows:
    """Row i is token `positions[i]` of `slots[i]`, both (rows,) integers on a device.

    The first `decoding` rows attend one by one. `chunks`, (chunks, 4) int32, has for each chunk of the others its first
    row, its number of rows, the position of its first token, and its slot; the longest one has `longest` rows.
    `columns` is up to which token of their sequences all rows see at most. `fresh` has the first
    row of each chunk and that behind its last one, if none of them has tokens before it.

    `singles` is for recorded passes: (decoding,) int32, the positions of rows that attend one by one, -1 for a row that
    does not. About `usual` of them do. The rows of neither kind attend to nothing.

    `ends`, (rows,) int32, has the last token that each row sees, if some see later ones than their own: tokens of an
    image. If `in_windows`, they do so in layers with a window alone.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    decoding: int
    columns: int
    chunks: torch.Tensor | None = None
    longest: int = 0
    fresh: tuple[tuple[int, int], ...] = ()
    singles: torch.Tensor | None = None
    usual: int = 0
    ends: torch.Tensor | None = None
    in_windows: bool = False

    def ends_under(self, window: int) -> torch.Tensor | None:
        """Return `ends` for a layer with such a window, 0 for none."""
        return None if self.in_windows and not window else self.ends

    def empty_or_zero(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor for what is attended, in which rows that only fill up the pass are zero."""
        every = self.singles is None and shape[0] == len(self.slots)
        return like.new_empty(shape) if every else like.new_zeros(shape)

    @classmethod
    def from_step(cls, rows: StepRows, device: torch.device) -> PageRows:
        lengths = [chunk.end - chunk.start for chunk in rows.chunks]
        slots = [rows.slots, np.repeat([chunk.slot for chunk in rows.chunks], lengths)]
        positions = [rows.positions, *(np.arange(chunk.start, chunk.end) for chunk in rows.chunks)]
        both = np.stack((np.concatenate(slots), np.concatenate(positions))).astype(np.int32)
        chunks = [(chunk.first, chunk.end - chunk.start, chunk.start, chunk.slot) for chunk in rows.chunks]
        on_device = upload(both, device)
        with_blocks = [chunk for chunk in rows.chunks if chunk.blocks]
        return cls(
            on_device[0].clone(),  # the launches are for addresses that are multiples of 16
            on_device[1].clone(),
            len(rows.slots),
            int(both[1].max(initial=0)) + 1,
            upload(np.array(chunks, np.int32), device) if chunks else None,
            max(lengths, default=0),
            () if any(chunk.start for chunk in rows.chunks) else tuple((row.first, row.last) for row in rows.chunks),
            ends=upload(_last_seen(with_blocks, both[1]), device) if with_blocks else None,
            in_windows=any(chunk.in_windows for chunk in with_blocks),
        )

    @classmethod
    def from_singles(cls, rows: SingleRows) -> PageRows:
        """Return rows that all decode."""
        return cls(rows.slots.int(), rows.positions.int(), len(rows.slots), rows.columns)


def _last_seen(chunks: Iterable[ChunkRows], positions: np.ndarray) -> np.ndarray:
    """Return the last token that each row at `positions` sees: its own one, or the last one of its block."""
    seen = positions.copy()
    for chunk in chunks:
        for begin, end in chunk.blocks:
            first = chunk.first - chunk.start
            seen[first + begin : first + end] = end - 1
    return seen

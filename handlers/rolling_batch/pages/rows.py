"""What the rows of a forward pass are, for attention over pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from handlers.rolling_batch.attention.rows import StepRows
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
        return cls(
            on_device[0].clone(),  # the launches are for addresses that are multiples of 16
            on_device[1].clone(),
            len(rows.slots),
            int(both[1].max(initial=0)) + 1,
            upload(np.array(chunks, np.int32), device) if chunks else None,
            max(lengths, default=0),
            () if any(chunk.start for chunk in rows.chunks) else tuple((row.first, row.last) for row in rows.chunks),
        )

    @classmethod
    def from_singles(cls, rows: SingleRows) -> PageRows:
        """Return rows that all decode."""
        return cls(rows.slots.int(), rows.positions.int(), len(rows.slots), rows.columns)

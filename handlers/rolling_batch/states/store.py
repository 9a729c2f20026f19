"""The states of all sequences, one row for each, and which rows a pass reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from handlers.rolling_batch.schedule.state_table import RowCopy
from handlers.rolling_batch.states.forms import StateShape


@dataclass(frozen=True)
class Segment:
    """Rows `first:last` of the pass: one token of each of several sequences, or the tokens of one.

    `rows` are the sequences' rows of the store. `continues`: there are states of earlier tokens.
    """

    first: int
    last: int
    rows: torch.Tensor
    decodes: bool
    continues: bool


class StateStore:
    """The states of `rows` sequences. The tensors of a mixer are (rows, ...) each."""

    def __init__(self, shapes: Sequence[Sequence[StateShape]], rows: int) -> None:
        self.rows = rows
        self.segments: list[Segment] | None = None  # of the current pass; None before the first
        self.enter: Callable[[int, int], None] = lambda first, last: None  # is told which rows follow
        self._areas = [
            [torch.zeros((rows, *shape.shape), dtype=shape.dtype, device=shape.device) for shape in own]
            for own in shapes
        ]

    @property
    def idle_row(self) -> int:
        """The last row, for rows that fill up a pass."""
        return self.rows - 1

    def clear(self, rows: Sequence[int]) -> None:
        """Set rows to zero."""
        for areas in self._areas:
            for area in areas:
                area[list(rows)] = 0

    def begin(self, segments: list[Segment]) -> None:
        """Set what the rows of the next pass are."""
        self.segments = segments

    def read(self, mixer: int, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return a copy of a mixer's states of some sequences."""
        return [area.index_select(0, rows) for area in self._areas[mixer]]

    def write(self, mixer: int, rows: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        for area, state in zip(self._areas[mixer], states, strict=True):
            area.index_copy_(0, rows, state.to(area.dtype))

    def copy(self, copies: Sequence[RowCopy]) -> None:
        """Copy rows, one after the other."""
        for copy in copies:
            for areas in self._areas:
                for area in areas:
                    area[copy.target] = area[copy.source]


def bytes_per_row(shapes: Sequence[Sequence[StateShape]]) -> int:
    """Return the bytes that the states of one sequence occupy."""
    return sum(shape.nbytes for own in shapes for shape in own)
